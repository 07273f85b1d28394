"""FP8 and MXFP4 weights, against loops over single values."""

import math

import numpy as np
import pytest
import torch
from hf_tiny import hf_model
from safetensors.torch import load_file, save_file

import titan_moe
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.hf.quantized import dequantize_fp8, dequantize_mxfp4

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def fp8_oracle(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Block by block, the last row and column of blocks ragged."""
    out = weight.float()
    for i in range(math.ceil(out.shape[0] / 128)):
        for j in range(math.ceil(out.shape[1] / 128)):
            out[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scale[i, j]
    return out


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (math.ceil(n / 128) for n in weight.shape)
    scale = torch.rand(rows, columns) * 1e-3 + 1e-3
    return (weight * 300).to(torch.float8_e4m3fn), scale


def mxfp4_oracle(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Value by value: ``[E, rows, K/32, 16]`` to ``[E, K, rows]``."""
    E, rows, groups, _ = blocks.shape
    out = np.zeros((E, groups * 32, rows), dtype=np.float64)
    for e, row, group, i in np.ndindex(blocks.shape):
        for k, nibble in (
            (2 * i, int(blocks[e, row, group, i]) % 16),
            (2 * i + 1, int(blocks[e, row, group, i]) // 16),
        ):
            value = E2M1[nibble % 8] * (-1 if nibble >= 8 else 1)
            out[e, group * 32 + k, row] = value * 2.0 ** (int(scales[e, row, group]) - 127)
    return out


@pytest.mark.parametrize("shape", [(192, 130), (576, 256), (128, 128), (1, 1), (129, 5)])
def test_fp8_blocks_are_128_wide_and_the_last_is_ragged(shape):
    weight, scale = quantize_fp8(torch.randn(shape))
    assert torch.equal(dequantize_fp8(weight, scale), fp8_oracle(weight, scale))
    stacked = dequantize_fp8(weight.expand(3, *shape), scale.expand(3, *scale.shape))
    assert torch.equal(stacked[2], fp8_oracle(weight, scale))


@pytest.mark.parametrize("shape", [(3, 2), (1, 2), (2, 1), (2,)])
def test_fp8_scales_of_another_shape_are_refused(shape):
    with pytest.raises(CheckpointError, match=r"down_proj.*\[192, 130\].*128 x 128 need \[2, 2\]"):
        dequantize_fp8(torch.zeros(192, 130, dtype=torch.float8_e4m3fn), torch.ones(shape), "down_proj")


def mxfp4_weights(shape, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, shape, dtype=np.uint8), random.integers(110, 130, shape[:-1], dtype=np.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_exact_for_every_byte_and_scale(dtype):
    blocks, scales = mxfp4_weights((2, 16, 2, 16))
    blocks[0] = np.arange(256, dtype=np.uint8).repeat(2).reshape(16, 2, 16)
    scales[1, 0] = (1, 254)
    got = dequantize_mxfp4(torch.from_numpy(blocks), torch.from_numpy(scales), dtype)
    assert got.dtype == dtype
    # inf for the one value past fp32's range, as the oracle's float64 cast to fp32 has it.
    assert torch.equal(got.float(), torch.from_numpy(mxfp4_oracle(blocks, scales)).float())


def test_mxfp4_is_what_transformers_reads():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = map(torch.from_numpy, mxfp4_weights((3, 8, 4, 16)))
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.bfloat16), expected)


def test_an_fp8_file_loads_as_bfloat16_or_exactly_in_fp32(tmp_path):
    theirs = hf_model("Qwen3Moe", hidden_size=192, moe_intermediate_size=130)
    theirs.bfloat16().save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in list(tensors):
        # Most files leave embedding, head, norms and router alone; the scales beside a weight decide.
        if ".experts." in name or "o_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(tensors[name].float())
            expected[name] = fp8_oracle(tensors[name], tensors[f"{name}_scale_inv"])
        else:
            expected[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for dtype in (None, torch.float32):
        got = dict(titan_moe.iter_hf_tensors(titan_moe.load_hf(tmp_path, dtype)))
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            want = torch.float32 if dtype or "mlp.gate." in name else torch.bfloat16
            assert got[name].dtype == want and torch.equal(got[name], tensor.to(want)), name


def mxfp4_folder(path):
    theirs = hf_model("GptOss")
    theirs.bfloat16().save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    expected = dict(tensors)
    for layer in range(2):
        for linear, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            name = f"model.layers.{layer}.mlp.experts.{linear}"
            blocks, scales = mxfp4_weights((4, rows, columns // 32, 16), seed=layer)
            del tensors[name]
            tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
            expected[name] = torch.from_numpy(mxfp4_oracle(blocks, scales)).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return tensors, expected


def test_an_mxfp4_file_loads_and_exports_as_bfloat16(tmp_path):
    _, expected = mxfp4_folder(tmp_path)
    ours = titan_moe.load_hf(tmp_path)
    got = dict(titan_moe.iter_hf_tensors(ours))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name].float(), tensor.float()) for name, tensor in expected.items())
    # Gate is the even row: the first linear of expert 1, value by value.
    assert torch.equal(
        ours.layers["1"].mlp.experts.w1[1, 0].T, expected["model.layers.1.mlp.experts.gate_up_proj"][1, :, ::2]
    )


def test_blocks_without_scales_are_refused(tmp_path):
    tensors, _ = mxfp4_folder(tmp_path)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales: missing"):
        titan_moe.load_hf(tmp_path)


def test_fp8_without_scales_is_refused(tmp_path):
    hf_model("Qwen3Moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for dtype in (None, torch.float32):
        with pytest.raises(CheckpointError, match=f"{name}: is torch.float8_e4m3fn but has no {name}_scale_inv"):
            titan_moe.load_hf(tmp_path, dtype)


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq'.*'fp8' and 'mxfp4'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\]"),
    ],
)
def test_other_quantisations_are_refused(quantization, message, tmp_path):
    model = hf_model("Qwen3Moe")
    model.config.quantization_config = quantization
    with pytest.raises(ConfigError, match=message):
        titan_moe.load_hf(model)
