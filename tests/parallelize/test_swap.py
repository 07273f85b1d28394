"""transformers models and other people's MoE blocks: exchanged for ours, then in any layout, as they were."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layouts import gradient_errors
from torch import nn

from titan_moe.config.job import Parallelism
from titan_moe.distributed import all_reduce_sum, rank
from titan_moe.errors import ConfigError
from titan_moe.models.loss import cross_entropy_sum
from titan_moe.moe import MoE, MoEConfig
from titan_moe.moe.balance import finish_step
from titan_moe.parallelize import Experts, MoEAdapter, Router, VocabParallel, build_meshes, parallelize, swap_moe
from titan_moe.parallelize.swap import Listed, transformers_adapter

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

_COMMON = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "use_cache": False,
}
_SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
_MLA = {"q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}
_EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
HF = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    "MiniMaxM2": {"head_dim": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 4, "num_experts": 8, "norm_topk_prob": True},
    "DeepseekV3": {**_EXPERTS, **_SHARED, **_MLA, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
    "Glm4Moe": {**_EXPERTS, **_SHARED, "n_group": 1, "topk_group": 1, "head_dim": 4, "use_qk_norm": True},
    "GptOss": {
        "head_dim": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def hf_model(family):
    """In float64, every value random."""
    torch.manual_seed(0)
    attention = "eager" if family == "GptOss" else "sdpa"
    config = getattr(transformers, f"{family}Config")(
        **{**_COMMON, **HF[family]}, attn_implementation=attention, experts_implementation="eager"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and "norm" in name
            parameter.normal_(1.0 if norm else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


def _step(model, rows=slice(None)):
    """Loss of some of four rows over the tokens of all."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(30, (4, 6), generator=generator) for _ in range(2))
    loss = cross_entropy_sum(model(input_ids=ids[rows]).logits, labels[rows])
    (loss / labels.numel()).backward()
    return loss.detach()


@pytest.mark.parametrize("family", HF)
def test_a_swapped_model_is_the_same_model(family):
    model = hf_model(family)
    want = copy.deepcopy(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert swap_moe(model, transformers_adapter(model)) is model
    assert sum(isinstance(module, MoE) for module in model.modules()) == (
        1 if "Deepseek" in family or "Glm" in family else 2
    )
    # The very tensors, under their names; of ours only counters are added, which no state dict has.
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    assert all(tensor is parameters[name] for name, tensor in model.named_parameters())
    assert all(dict(model.named_buffers())[name] is tensor for name, tensor in buffers.items())
    assert model.state_dict().keys() == want.state_dict().keys()
    # transformers computes the router's softmax in fp32.
    assert (_step(model) - _step(want)).abs() / want.lm_head.weight.grad.abs().max() < 1e-4
    for (name, a), (_, b) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 2e-6 * b.grad.abs().max(), name
    assert torch.equal(model.state_dict()["lm_head.weight"], want.state_dict()["lm_head.weight"])


def hf_layout_errors(family, degrees, sequence_parallel):
    meshes = build_meshes(Parallelism(**degrees))
    dp = meshes.degrees.dp_shard
    oracle = swap_moe(hf_model(family), transformers_adapter(hf_model(family)))
    losses = [_step(oracle, slice(r, None, dp)) for r in range(dp)]
    gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    model = parallelize(hf_model(family), meshes, sequence_parallel=sequence_parallel)
    place = meshes.degrees.coordinates(rank())[0]["dp_shard"]
    loss = _step(model, slice(place, None, dp))
    errors = gradient_errors(model, gradients)
    worst = max(errors, key=errors.get)
    return (loss - losses[place]).abs().item(), errors[worst], worst


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", HF)
def test_transformers_models_under_tp_and_ep(run_ranks, family, sequence_parallel):
    degrees = {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}
    # DeepSeek's norm of the latent rounds to fp32 the gradient of each rank's heads, before they are summed. MiniMax's
    # norm over all heads rounds to fp32, ours, whose sum of squares crosses the ranks, does not.
    limits = {"DeepseekV3": (1e-10, 1e-6), "MiniMaxM2": (1e-6, 1e-6)}
    loss_limit, limit = limits.get(family, (1e-10, 1e-10))
    for loss_error, gradient_error, name in run_ranks(2, hf_layout_errors, family, degrees, sequence_parallel):
        assert loss_error < loss_limit and gradient_error < limit, name


def test_qwen3_moe_under_tp_ep_and_fsdp(run_ranks):
    degrees = {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}
    for loss_error, gradient_error, name in run_ranks(8, hf_layout_errors, "Qwen3Moe", degrees, True):
        assert loss_error < 1e-10 and gradient_error < 1e-10, name


def fused_etp():
    with pytest.raises(ConfigError, match="keeps its gate and up weights in one dim"):
        parallelize(hf_model("Qwen3Moe"), build_meshes(Parallelism(expert_tensor_parallel_degree=2)))
    return True


def test_fused_gate_and_up_weights_are_not_cut_by_etp(run_ranks):
    assert run_ranks(2, fused_etp) == [True, True]


class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 6, bias=bias), nn.Linear(6, 8, bias=bias), nn.Linear(8, 6, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Holder(nn.Module):
    def __init__(self, kind):
        super().__init__()
        value = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.25])
        if kind == "parameter":
            self.bias = nn.Parameter(value)
        else:
            self.register_buffer("bias", value)


class TheirMoE(nn.Module):
    """Sigmoid scores, top-2, a selection bias somewhere, experts in a list."""

    def __init__(self, place="gate", kind="buffer", bias=False):
        super().__init__()
        self.gate = nn.Linear(8, 5, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(5))
        holder = Holder(kind)
        self.path = {"gate": "gate.bias_of_choice", "block": "bias_of_choice", "nested": "stats.bias"}[place]
        if place == "nested":
            self.stats = holder
        else:
            owner = self.gate if place == "gate" else self
            given = holder.bias
            if kind == "parameter":
                owner.bias_of_choice = given
            else:
                owner.register_buffer("bias_of_choice", given)

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.gate(flat).sigmoid()
        ids = (scores + self.get_value()).topk(2).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, k, None])
        return out.view_as(x)

    def get_value(self):
        value = self
        for part in self.path.split("."):
            value = getattr(value, part)
        return value


class TheirNet(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList(TheirMoE(**options) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def _adapter(path, bias=False, **changes):
    config = MoEConfig(
        **{"dim": 8, "hidden_dim": 6, "num_experts": 5, "top_k": 2, "score_function": "sigmoid", "expert_bias": True},
        **{"expert_linear_bias": bias, "router_dtype": "float64"},
    )
    return MoEAdapter(
        **{"block": TheirMoE, "config": lambda block: config, "expert_bias": path}
        | {"layout": Listed("w1", "w3", "w2")}
        | changes
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("place", ["gate", "block", "nested"])
def test_fault_26_the_bias_keeps_its_value_place_and_kind(place, kind, bias):
    torch.manual_seed(0)
    net = TheirNet(place=place, kind=kind, bias=bias).double()
    want = copy.deepcopy(net)
    path = net.blocks[0].path
    value = want.blocks[0].get_value().detach().clone()
    swap_moe(net, _adapter(path, bias))
    registry = dict(net.named_parameters() if kind == "parameter" else net.named_buffers())
    assert torch.equal(registry[f"blocks.0.{path}"], value)
    assert (f"blocks.0.{path}" in net.state_dict()) and "blocks.0.gate.weight" in net.state_dict()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    got, expected = net(x), want(x)
    assert (got - expected).abs().max() < 1e-12
    got.square().sum().backward()
    expected.square().sum().backward()
    assert (net.blocks[0].gate.weight.grad - want.blocks[0].gate.weight.grad).abs().max() < 1e-11
    w2 = torch.stack([expert.w2.weight.grad for expert in want.blocks[1].experts])
    assert (net.blocks[1].experts.w2.grad - w2).abs().max() < 1e-11
    # The bias moves in place, also in a copy, which then leaves the first alone.
    other = copy.deepcopy(net)
    finish_step(other)
    assert torch.equal(registry[f"blocks.0.{path}"], value)
    assert not torch.equal(dict(other.state_dict())[f"blocks.0.{path}"], value)
    finish_step(net)
    assert torch.equal(net.state_dict()[f"blocks.0.{path}"], other.state_dict()[f"blocks.0.{path}"])
    assert net.state_dict()[f"blocks.0.{path}"].dtype == value.dtype


class TheirModel(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.net = TheirNet(place=place, bias=True)
        self.head = nn.Linear(8, 30)

    def forward(self, ids):
        return self.head(self.net(self.embed(ids)))


THEIR_PLAN = {
    "embed": VocabParallel(),
    "net.blocks.*.gate": Router(),
    "net.blocks.*.experts": Experts(),
    "head": VocabParallel(),
}


def their_batch(rows):
    ids, labels = torch.randint(30, (2, 4, 7), generator=torch.Generator().manual_seed(1))
    return ids[rows], labels[rows], labels.numel()


def their_layout_errors(place, degrees):
    """Gradients under a layout against those of the block as it was written, and the bias after the step."""
    torch.manual_seed(0)
    original = TheirModel(place).double()
    adapter = _adapter(original.net.blocks[0].path, bias=True)
    alone, model = (swap_moe(copy.deepcopy(original), adapter) for _ in range(2))
    for module in (original, alone):
        ids, labels, count = their_batch(slice(None))
        (F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), reduction="sum") / count).backward()
    finish_step(alone)
    gradients = {name: p.grad for name, p in original.named_parameters() if ".experts." not in name}
    for index, block in enumerate(original.net.blocks):
        each = [[getattr(expert, name) for name in ("w1", "w3", "w2")] for expert in block.experts]
        for part, key in (("weight", "w"), ("bias", "b")):
            columns = zip(*each, strict=True)
            gate, up, down = (torch.stack([getattr(linear, part).grad for linear in column]) for column in columns)
            ours = f"net.blocks.{index}.experts.{key}"
            gradients |= {f"{ours}1": torch.stack((gate, up), 1), f"{ours}2": down}
    meshes = build_meshes(Parallelism(**degrees))
    parallelize(model, meshes, THEIR_PLAN)
    readers = meshes.dense["dp_shard"]
    ids, labels, count = their_batch(slice(readers.get_local_rank(), None, readers.size()))
    (cross_entropy_sum(model(ids), labels) / count).backward()
    finish_step(model, all_reduce_sum)
    buffers = dict(model.named_buffers())
    biases = {name: buffer for name, buffer in alone.named_buffers() if name.endswith("bias_of_choice")}
    assert len(biases) == 2 and all(torch.equal(buffers[name], bias) for name, bias in biases.items())
    return gradient_errors(model, gradients)


@pytest.mark.parametrize("place", ["gate", "block"])
@pytest.mark.parametrize("ranks, tp, ep, etp", [(2, 1, 2, 1), (2, 2, 2, 1), (2, 2, 1, 2), (4, 2, 2, 1)])
def test_their_block_under_a_layout_has_its_gradients(run_ranks, place, ranks, tp, ep, etp):
    degrees = {"tensor_parallel_degree": tp, "expert_parallel_degree": ep, "expert_tensor_parallel_degree": etp}
    for errors in run_ranks(ranks, their_layout_errors, place, degrees):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"block": "Nobody"}, "no MoE block Nobody"),
        ({"router": "router"}, r"blocks\.0, a TheirMoE, has no 'router'"),
        ({"expert_bias": "gate.nothing"}, "has no 'gate.nothing'"),
        (
            {"config": lambda block: MoEConfig(dim=8, hidden_dim=7, num_experts=5, top_k=2)},
            r"w1 of the Experts is \[5, 2, 6, 8\]",
        ),
        (
            {"config": lambda block: MoEConfig(dim=8, hidden_dim=6, num_experts=5, top_k=2)},
            r"is \[5\], the MoEConfig says none",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(changes, text):
    net = TheirNet()
    with pytest.raises(ConfigError, match=text):
        swap_moe(net, _adapter("gate.bias_of_choice", **changes))
    assert all(isinstance(block, TheirMoE) for block in net.blocks)


def test_a_model_of_no_known_family_needs_an_adapter():
    with pytest.raises(ConfigError, match=r"a TheirNet is no transformers model .* qwen3_moe.*MoEAdapter"):
        swap_moe(TheirNet())


def test_a_block_by_itself():
    block = TheirMoE()
    layer = swap_moe(block, _adapter("gate.bias_of_choice"))
    assert isinstance(layer, MoE) and torch.equal(layer.gate.weight, block.gate.weight)
