"""Faults that other systems had when converting checkpoints; the numbers are those of the list of known faults."""

import json

import pytest
import torch
from hf_tiny import equal, hf_model, on_disk, rewrite, tensors_of

import titan_moe
from titan_moe import models
from titan_moe.errors import CheckpointError


@pytest.mark.parametrize("stacked", [False, True])
def test_fault_22_twelve_experts_keep_their_order(stacked, tmp_path):
    theirs = hf_model("Qwen3Moe", num_experts=12)
    with torch.no_grad():
        for e in range(12):
            theirs.model.layers[0].mlp.experts.gate_up_proj[e] = e
            theirs.model.layers[0].mlp.experts.down_proj[e] = e + 100
    theirs.save_pretrained(tmp_path)
    ours = titan_moe.load_hf(theirs if stacked else tmp_path)
    experts = ours.layers["0"].mlp.experts
    assert experts.w1[:, 0, 0, 0].tolist() == experts.w1[:, 1, 0, 0].tolist() == list(range(12))
    assert experts.w2[:, 0, 0].tolist() == list(range(100, 112))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, None])
def test_fault_23_an_export_has_the_dtype_that_was_asked_for(dtype, tmp_path):
    ours = models.build("deepseek_v3", "debug", num_layers=2).bfloat16()
    ours.layers["1"].mlp.router.expert_bias.normal_()
    titan_moe.save_hf(ours, tmp_path / "out", dtype=dtype)
    for name, tensor in tensors_of(tmp_path / "out").items():
        router = ".mlp.gate." in name
        wanted = dtype or torch.bfloat16
        assert tensor.dtype == (torch.promote_types(wanted, torch.float32) if router else wanted), name
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["dtype"] == str(dtype or torch.bfloat16).removeprefix("torch.")


def test_fault_23_missing_and_unused_names_are_listed(qwen):
    tensors = tensors_of(qwen)
    tensors["model.layers.0.mlp.experts.3.up_projection.weight"] = tensors.pop(
        "model.layers.0.mlp.experts.3.up_proj.weight"
    )
    rewrite(qwen, tensors)
    with pytest.raises(CheckpointError) as error:
        titan_moe.load_hf(qwen)
    assert "1 missing: model.layers.0.mlp.experts.3.up_proj.weight." in str(error.value)
    assert "1 not used: model.layers.0.mlp.experts.3.up_projection.weight." in str(error.value)
    assert "\n" not in str(error.value)


def test_fault_23_long_lists_are_shortened_with_a_count(qwen):
    rewrite(qwen, {name: tensor for name, tensor in tensors_of(qwen).items() if ".experts." not in name})
    with pytest.raises(CheckpointError, match=r"48 missing: .* and 40 more\.$") as error:
        titan_moe.load_hf(qwen)
    assert len(str(error.value)) < 800


def test_fault_24_stacked_experts_become_per_expert_names(tmp_path):
    theirs = hf_model("Qwen3Moe")
    stacked = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    theirs.config.save_pretrained(tmp_path)
    rewrite(tmp_path, stacked)
    titan_moe.save_hf(titan_moe.load_hf(tmp_path), tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in written
    assert equal(written, on_disk(stacked, "Qwen3Moe"))


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe"])
def test_fault_24_the_selection_bias_of_main_layers_arrives(family, tmp_path):
    theirs = hf_model(family)
    bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.abs().min() > 0
    theirs.save_pretrained(tmp_path)
    for source in (tmp_path, theirs):
        assert torch.equal(titan_moe.load_hf(source).layers["1"].mlp.router.expert_bias, bias)


@pytest.mark.parametrize("place", ["gate.e_score_correction_bias", "e_score_correction_bias", "gate.expert_bias"])
def test_fault_26_the_bias_is_found_on_gate_and_block_and_stays_a_buffer(place, tmp_path):
    hf_model("DeepseekV3").save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    bias = tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    rewrite(tmp_path, tensors | {f"model.layers.1.mlp.{place}": bias})
    ours = titan_moe.load_hf(tmp_path)
    name = "layers.1.mlp.router.expert_bias"
    assert torch.equal(dict(ours.named_buffers())[name], bias)
    assert name not in dict(ours.named_parameters())


def test_fault_17_bfloat16_leaves_router_and_bias_bit_exact(tmp_path):
    hf_model("DeepseekV3").save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    for ours in (titan_moe.load_hf(tmp_path, torch.bfloat16), titan_moe.load_hf(tmp_path).to(torch.bfloat16)):
        router = ours.layers["1"].mlp.router
        assert torch.equal(router.weight, tensors["model.layers.1.mlp.gate.weight"])
        assert torch.equal(router.expert_bias, tensors["model.layers.1.mlp.gate.e_score_correction_bias"])
        assert router.weight.dtype == router.expert_bias.dtype == torch.float32
        assert ours.lm_head.weight.dtype == ours.layers["1"].mlp.experts.w1.dtype == torch.bfloat16
