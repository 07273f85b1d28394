"""Dense Hugging Face checkpoints into experts: the same logits, and a model that trains."""

import json

import pytest
import torch
import transformers
from hf_tiny import edit_config, tensors_of
from tiny_families import COMMON

import titan_moe
from titan_moe.cli import main
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.hf.upcycle import Upcycle, upcycle_hf
from titan_moe.models import token_losses

TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(2))
DENSE = {
    "Llama": {},
    "Mistral": {"sliding_window": 5, "head_dim": 16},
    "Qwen3": {"head_dim": 16},
}


class Norm64(torch.nn.Module):
    """RMSNorm in float64; transformers' own rounds to fp32 inside."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Rotary64(torch.nn.Module):
    """cos and sin in float64; transformers' own are fp32."""

    def __init__(self, theta, dim):
        super().__init__()
        self.frequencies = 1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def in_float64(model):
    """The same model without fp32 inside."""
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, Norm64(child))
    model.model.rotary_emb = Rotary64(model.config.rope_parameters["rope_theta"], 16)
    return model


def dense_model(kind, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    settings = {**COMMON, "intermediate_size": 96, **DENSE[kind], "attn_implementation": "sdpa", **changes}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("experts, granularity, top_k", [(8, 2, 2), (4, 1, 2), (8, 4, 8)])
@pytest.mark.parametrize("kind", DENSE)
@torch.no_grad()
def test_logits_are_the_dense_models_to_1e_12_in_float64(kind, experts, granularity, top_k, tmp_path):
    dense = dense_model(kind)
    dense.save_pretrained(tmp_path / "dense")
    command = f"upcycle --dense {tmp_path}/dense --output {tmp_path}/moe --experts {experts}"
    main(f"{command} --granularity {granularity} --top-k {top_k}".split())
    ours = titan_moe.load_hf(tmp_path / "moe").eval()
    moe = ours.config.moe
    assert (moe.num_experts, moe.top_k, moe.hidden_dim) == (experts, top_k, 96 // granularity)
    expected = in_float64(dense)(TOKENS).logits
    assert (ours(TOKENS) - expected).abs().max() < 1e-12 * expected.abs().max()
    # The router does choose: what it adds to is not a tie everywhere.
    assert ours.layers["0"].mlp.router.weight.std() > 0.01


def test_what_is_written_loads_in_transformers_and_trains(tmp_path):
    dense = dense_model("Qwen3", torch.float32, tie_word_embeddings=True)
    dense.save_pretrained(tmp_path / "dense")
    upcycle_hf(Upcycle(str(tmp_path / "dense"), str(tmp_path / "moe"), experts=8, granularity=2, top_k=2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM" and theirs.config.eos_token_id == 2
    expected = dense(TOKENS).logits
    assert (theirs(TOKENS).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    ours = titan_moe.load_hf(tmp_path / "moe")
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(token_losses(ours(TOKENS), TOKENS.roll(-1, 1)).total)
        losses[-1].backward()
        assert ours.layers["1"].mlp.router.weight.grad.abs().max() > 0
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]


def test_router_rows_depend_on_the_seed_and_the_layer_and_on_nothing_else(tmp_path):
    dense_model("Llama", torch.bfloat16).save_pretrained(tmp_path / "dense")
    rows = []
    for i, seed in enumerate((0, 0, 7)):
        torch.manual_seed(i)
        upcycle_hf(Upcycle(str(tmp_path / "dense"), str(tmp_path / f"{i}"), seed=seed))
        tensors = tensors_of(tmp_path / f"{i}")
        rows.append([tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in (0, 1)])
        assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16 and rows[-1][0].dtype == torch.float32
    assert torch.equal(rows[0][0], rows[1][0]) and not torch.equal(rows[0][0], rows[2][0])
    assert not torch.equal(rows[0][0], rows[0][1])


@pytest.mark.parametrize(
    "options, changes, message",
    [
        ({"granularity": 5}, {}, "hidden dim 96|granularity = 5 does not divide"),
        ({"granularity": 2, "top_k": 3}, {}, "top_k = 3 is not a multiple of granularity = 2"),
        ({"experts": 0}, {}, "--experts 0: must be at least 1"),
        ({}, {"model_type": "qwen2"}, "model_type = 'qwen2' cannot be upcycled; only llama, mistral, qwen3"),
        ({}, {"attention_bias": True}, "attention_bias = True: qwen3_moe has no such bias"),
        ({}, {"num_hidden_layers": 3}, "missing: model.layers.2"),
    ],
)
def test_what_cannot_be_upcycled_says_why_and_writes_nothing(options, changes, message, tmp_path):
    dense_model("Qwen3", torch.float32).save_pretrained(tmp_path / "dense")
    edit_config(tmp_path / "dense", **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        upcycle_hf(Upcycle(str(tmp_path / "dense"), str(tmp_path / "moe"), **options))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    dense_model("Llama", torch.float32).save_pretrained(tmp_path / "dense")
    main(f"upcycle --dense {tmp_path}/dense --output {tmp_path}/moe --experts 4 --dtype bfloat16".split())
    assert capsys.readouterr().out == f"wrote {tmp_path}/moe: mixtral, 2 layers of 4 experts, 96 wide, 2 per token\n"
    assert json.loads((tmp_path / "moe/config.json").read_text())["dtype"] == "bfloat16"
