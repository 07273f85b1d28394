"""Our models against transformers' own, through the files on disk."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_tiny import hf_model, on_disk
from safetensors import safe_open
from tiny_families import FAMILIES

import titan_moe
from titan_moe import models

# fp32 sums in another order: transformers' loop over experts and ours differ by a few ulp.
LOGITS, LOSS, GRADIENT = 1e-5, 1e-6, 1e-4

# Every token id, the padding id included: transformers gives its embedding no gradient.
TOKENS = torch.randperm(128, generator=torch.Generator().manual_seed(1)).view(4, 32)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


def next_token_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """Family, transformers' model, and the folder it was saved to."""
    torch.set_num_threads(1)
    model = hf_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder


def test_logits_loss_and_every_gradient_are_those_of_transformers(saved):
    family, theirs, folder = saved
    ours = titan_moe.load_hf(folder)
    expected = theirs(TOKENS, labels=TOKENS)
    expected.loss.backward()
    logits = ours(TOKENS)
    loss = next_token_loss(logits)
    loss.backward()

    assert (logits - expected.logits).abs().max() < LOGITS
    assert abs(loss - expected.loss) < LOSS
    gradients = on_disk({name: p.grad for name, p in theirs.named_parameters()}, family)
    got = dict(titan_moe.iter_hf_tensors(ours, source="gradient"))
    assert got.keys() == gradients.keys()
    assert gradients["model.embed_tokens.weight"][0].abs().max() == 0
    for name, gradient in gradients.items():
        assert (got[name] - gradient).norm() <= GRADIENT * gradient.norm(), name
    theirs.zero_grad()


def test_an_export_gives_transformers_bit_equal_weights_and_the_same_config(saved, tmp_path):
    _, theirs, folder = saved
    titan_moe.save_hf(titan_moe.load_hf(folder), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(again) is type(theirs)
    expected, got = theirs.state_dict(), again.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    before, after = theirs.config.to_dict(), again.config.to_dict()
    # Written explicitly, or about layers that this file never held.
    explicit = {"_name_or_path", "head_dim", "num_nextn_predict_layers", "architectures", "dtype"}
    assert {key: after[key] for key in before.keys() - explicit} == {
        key: before[key] for key in before.keys() - explicit
    }


def test_names_and_shapes_on_disk_are_those_of_save_pretrained(saved, tmp_path):
    _, _, folder = saved
    titan_moe.save_hf(titan_moe.load_hf(folder), tmp_path / "out")

    def entries(path):
        with safe_open(path / "model.safetensors", framework="pt") as file:
            return {name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in file.keys()}

    assert entries(tmp_path / "out") == entries(folder)


def test_a_model_instance_gives_what_its_folder_gives(saved):
    _, theirs, folder = saved
    from_disk, from_memory = (dict(titan_moe.iter_hf_tensors(titan_moe.load_hf(x))) for x in (folder, theirs))
    assert from_disk.keys() == from_memory.keys()
    assert all(torch.equal(from_disk[name], from_memory[name]) for name in from_disk)


def test_bfloat16_weights_go_through_bit_exactly_and_the_router_computes_in_fp32(saved, tmp_path):
    _, theirs, _ = saved
    half = type(theirs)(theirs.config).bfloat16()
    half.load_state_dict(theirs.state_dict())
    half.save_pretrained(tmp_path / "in")
    ours = titan_moe.load_hf(tmp_path / "in")
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
    titan_moe.save_hf(ours, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected, got = half.state_dict(), again.state_dict()
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(got[name].float(), tensor.float()) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "family, rope",
    [
        ("Qwen3Moe", YARN),
        ("GptOss", {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("DeepseekV3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}),
    ],
)
def test_yarn_in_both_generations_of_config(family, rope, tmp_path):
    theirs = hf_model(family, rope_parameters=dict(rope)).eval()
    theirs.save_pretrained(tmp_path)
    expected = theirs(TOKENS).logits
    assert (titan_moe.load_hf(tmp_path)(TOKENS) - expected).abs().max() < LOGITS

    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (titan_moe.load_hf(tmp_path)(TOKENS) - expected).abs().max() < LOGITS

    titan_moe.save_hf(titan_moe.load_hf(tmp_path), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(again(TOKENS).logits, expected)


def test_tied_embeddings(tmp_path):
    theirs = hf_model("Qwen3Moe", tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "in")
    ours = titan_moe.load_hf(tmp_path / "in")
    assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() < LOGITS
    names = [name for name, _ in titan_moe.iter_hf_tensors(ours)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    # In memory transformers lists the head beside the embedding that it is.
    assert torch.equal(titan_moe.load_hf(theirs)(TOKENS), ours(TOKENS))
    titan_moe.save_hf(ours, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, theirs.lm_head.weight)
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize(
    "family, changes",
    [
        ("Qwen3Moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
        ("Mixtral", {"sliding_window": 4}),
        ("Qwen2Moe", {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [0]}),
        ("MiniMaxM2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "num_experts_per_tok": 3}),
        ("DeepseekV2", {"topk_method": "greedy", "q_lora_rank": 32}),
        ("DeepseekV3", {"q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False, "n_shared_experts": 2}),
        ("Glm4Moe", {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.25}),
        ("GptOss", {"layer_types": ["sliding_attention"] * 2, "swiglu_limit": 0.05, "swiglu_alpha": 1.0}),
    ],
)
def test_every_setting_of_config_json_reaches_the_model(family, changes, tmp_path):
    theirs = hf_model(family, **changes).eval()
    theirs.save_pretrained(tmp_path / "in")
    ours = titan_moe.load_hf(tmp_path / "in")
    assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() < LOGITS
    titan_moe.save_hf(ours, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize(
    "family, flavor", [(family, "debug") for family in ("deepseek_v3", "kimi_k2", "gpt_oss", "qwen2_moe", "minimax_m2")]
)
def test_a_model_that_never_was_a_file_exports_to_transformers(family, flavor, tmp_path):
    ours = models.build(family, flavor, init_std=0.1).eval()
    titan_moe.save_hf(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = theirs(TOKENS).logits
    # Logits reach 5 here, and each side is 1e-5 from the float64 result.
    assert (ours(TOKENS) - expected).abs().max() < LOGITS * expected.abs().max()
