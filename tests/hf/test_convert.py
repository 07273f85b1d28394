"""``titan-moe convert``: both ways, bit for bit, with a dtype per name."""

import json
import os
from dataclasses import asdict

import pytest
import torch
from benchmark_files import load_benchmark
from hf_tiny import edit_config, equal, hf_model, rewrite, tensors_of
from safetensors.torch import load_file
from tiny_families import FAMILIES

import titan_moe
from titan_moe import models
from titan_moe.checkpoint import Checkpointer, load_weights
from titan_moe.cli import main
from titan_moe.config import JobConfig
from titan_moe.convert import Convert, convert
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.hf.quantized import dequantize_fp8

TOKENS = torch.arange(32).view(2, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal_with_names_and_dtypes(family, tmp_path):
    hf_model(family).bfloat16().save_pretrained(tmp_path / "in")
    main(["convert", str(tmp_path / "in"), str(tmp_path / "ours")])
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.toml", "step-0"]
    main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--dtype", "source"])
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert equal(after, before)
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    # Without a word about dtypes the router is float32, as it computes.
    convert(Convert(str(tmp_path / "ours/step-0"), str(tmp_path / "out")))
    gates = [t.dtype for n, t in tensors_of(tmp_path / "out").items() if n.endswith((".gate.weight", "router.weight"))]
    assert gates and set(gates) == {torch.float32}


def test_the_checkpoint_is_the_model_and_says_how_to_train_it(qwen, tmp_path, capsys):
    main(f"convert {qwen} {tmp_path}/ours --dtype float64".split())
    assert f"./run_train.sh --job.config_file {tmp_path}/ours/config.toml" in capsys.readouterr().out
    from titan_moe.generate import load

    model, _ = load(str(tmp_path / "ours"))
    assert model.lm_head.weight.dtype == torch.float64
    assert torch.equal(model(TOKENS), titan_moe.load_hf(qwen, torch.float64).eval()(TOKENS))
    from titan_moe.config import load_config

    job = load_config(["--job.config_file", f"{tmp_path}/ours/config.toml"])
    assert (job.model.name, job.model.flavor, job.training.dtype) == ("qwen3_moe", "debug", "float64")
    assert job.checkpoint.initial_load_path == str(tmp_path / "ours")


def test_fp8_out_holds_linears_in_blocks_and_comes_back_within_its_rounding(tmp_path):
    hf_model("Qwen3Moe", hidden_size=192, moe_intermediate_size=130).save_pretrained(tmp_path / "in")
    main(f"convert {tmp_path}/in {tmp_path}/out --to hf --dtype fp8 --dtype-for *.k_proj.weight=float32".split())
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    scales = {name for name in after if name.endswith("_scale_inv")}
    assert after.keys() - scales == before.keys()
    for name, tensor in before.items():
        if f"{name}_scale_inv" not in scales:
            kept = name.endswith(("k_proj.weight", "gate.weight"))
            assert after[name].dtype == (torch.float32 if kept else torch.bfloat16), name
            continue
        assert after[name].dtype == torch.float8_e4m3fn
        assert (".experts." in name) or name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight")), name
        back = dequantize_fp8(after[name], after[f"{name}_scale_inv"])
        # E4M3 has 3 bits behind the point, so half a step is 1/16; near zero a step is 2**-9 of the scale.
        step = 2**-10 * after[f"{name}_scale_inv"].max()
        assert ((back - tensor).abs() <= tensor.abs() / 16 * (1 + 1e-6) + step).all(), name
        # A block's largest value is exact up to fp32.
        torch.testing.assert_close(back[:128, :128].abs().max(), tensor[:128, :128].abs().max())
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (
        config["weight_block_size"] == [128, 128]
        and "model.layers.0.self_attn.k_proj" in config["modules_to_not_convert"]
    )
    # What was read from FP8 is written to FP8 again as it was, up to one rounding of the scale.
    main(f"convert {tmp_path}/out {tmp_path}/ours --dtype float32".split())
    main(f"convert {tmp_path}/ours {tmp_path}/again --dtype source".split())
    again = tensors_of(tmp_path / "again")
    assert again.keys() == after.keys()
    for name, tensor in after.items():
        assert again[name].dtype == tensor.dtype, name
        if name in scales:
            torch.testing.assert_close(again[name], tensor, rtol=2**-22, atol=0)
        else:
            assert torch.equal(again[name].float(), tensor.float()), name


@pytest.mark.parametrize("shape", [(192, 130), (576, 256)])
def test_fp8_weights_are_read_exactly_by_the_ceil_128_rule_in_slices_too(shape, tmp_path):
    rows, columns = shape
    hf_model("Mixtral", hidden_size=columns, head_dim=16, intermediate_size=rows, num_local_experts=2).save_pretrained(
        tmp_path
    )
    tensors = tensors_of(tmp_path)
    expected = {}
    for name in list(tensors):
        if ".w1." in name or ".w3." in name:
            stored = (tensors[name] * 300).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-stored.shape[0] // 128), -(-stored.shape[1] // 128)) + 0.1
            expected[name] = stored.float()
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    expected[name][i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scale[i, j]
            tensors |= {name: stored, f"{name}_scale_inv": scale}
    rewrite(tmp_path, tensors)
    got = dict(titan_moe.iter_hf_tensors(titan_moe.load_hf(tmp_path, torch.float32)))
    assert expected and all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    from titan_moe.hf.source import Dequantized, open_source

    source = Dequantized(open_source(tmp_path))
    for name, tensor in list(expected.items())[:2]:
        for first, end, left, right in ((0, 1, 0, 5), (100, 140, 3, columns), (rows - 1, rows, 0, columns)):
            part = source.part(name, (slice(first, end, 1), slice(left, right, 1)))
            assert torch.equal(part, tensor[first:end, left:right])


def test_mtp_layers_that_are_not_trained_pass_through_a_conversion(tmp_path, caplog):
    ours = models.build("deepseek_v3", "debug", num_layers=2, mtp_depth=2)
    titan_moe.save_hf(ours, tmp_path / "in")
    with caplog.at_level("WARNING"):
        convert(Convert(str(tmp_path / "in"), str(tmp_path / "ours")))
    assert "tensors of MTP layers stay in" in caplog.text
    convert(Convert(str(tmp_path / "ours"), str(tmp_path / "out")))
    assert equal(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))
    (tmp_path / "in").rename(tmp_path / "moved")
    with caplog.at_level("WARNING"):
        convert(Convert(str(tmp_path / "ours"), str(tmp_path / "lost")))
    assert "is gone: MTP layers of it that were not trained are lost" in caplog.text
    assert not any(name.startswith("model.layers.2.") for name in tensors_of(tmp_path / "lost"))
    convert(Convert(str(tmp_path / "ours"), str(tmp_path / "like"), like=str(tmp_path / "moved")))
    assert equal(tensors_of(tmp_path / "like"), tensors_of(tmp_path / "moved"))


def test_fault_23_a_pattern_decides_the_dtype(qwen, tmp_path):
    rules = ["*.mlp.gate.weight=bfloat16", "*.layers.0.*=float16", "*norm*=float64"]
    convert(Convert(str(qwen), str(tmp_path / "out"), to="hf", dtype_for=rules))
    for name, tensor in tensors_of(tmp_path / "out").items():
        want = torch.float32
        want = torch.float64 if "norm" in name else want
        want = torch.float16 if ".layers.0." in name else want
        want = torch.bfloat16 if name.endswith(".mlp.gate.weight") else want
        assert tensor.dtype == want, name


def test_fault_21_a_pattern_that_fits_nothing_is_refused(qwen, tmp_path):
    with pytest.raises(ConfigError, match=r"dtype_for '\*\.router\.\*': fits no tensor"):
        convert(Convert(str(qwen), str(tmp_path / "out"), to="hf", dtype_for=["*.router.*=fp8"]))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_a_training_run_becomes_a_hugging_face_folder(tmp_path, capsys):
    job = JobConfig()
    job.model.name, job.model.override = "minimax_m2", {"num_layers": 2, "hidden_dim": 48}
    ours = models.build("minimax_m2", "debug", num_layers=2, hidden_dim=48)
    optimizer = torch.optim.AdamW(ours.parameters())
    ours(TOKENS).square().mean().backward()
    optimizer.step()
    Checkpointer(tmp_path / "run/checkpoint").save(3, ours, optimizer, extra={"config": asdict(job)})
    convert(Convert(str(tmp_path / "run"), str(tmp_path / "out")))
    assert equal(tensors_of(tmp_path / "out"), dict(titan_moe.iter_hf_tensors(ours)))
    # What is converted is a checkpoint like any other.
    convert(Convert(str(tmp_path / "out"), str(tmp_path / "again")))
    main(["inspect", str(tmp_path / "again")])
    assert "minimax_m2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        ("--dtype int8", "dtype 'int8': unknown"),
        ("--dtype fp8", "fp8 and source are for Hugging Face"),
        ("--dtype_for x", "'x': write PATTERN=DTYPE"),
        ("--dtype_for *=float32", "a checkpoint has the model's dtypes"),
        ("--to hf --like elsewhere", "is itself the Hugging Face folder"),
        ("--to hf --dtype_for *norm.weight=fp8", r"norm\.weight of shape \[64\] is no matrix"),
        ("--to hf --max_shard_gb 0", "max_shard_gb = 0.0: must be more than 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, qwen, tmp_path):
    from titan_moe.config import read_options

    argv = [f"--input={qwen}", f"--output={tmp_path}/out", *options.split()]
    with pytest.raises((ConfigError, CheckpointError), match=message):
        convert(Convert(**read_options(Convert, argv, "convert")))
    assert not (tmp_path / "out").exists()


def test_outputs_and_inputs_that_cannot_be_are_refused(qwen, tmp_path):
    convert(Convert(str(qwen), str(tmp_path / "ours")))
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        convert(Convert(str(qwen), str(tmp_path / "ours")))
    with pytest.raises(ConfigError, match="is a titan_moe checkpoint already"):
        convert(Convert(str(tmp_path / "ours"), str(tmp_path / "out"), to="checkpoint"))
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(Convert(str(tmp_path / "nowhere"), str(tmp_path / "out")))
    data = next((tmp_path / "ours/step-0").glob("*.distcp"))
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        convert(Convert(str(tmp_path / "ours"), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_model_that_fits_no_flavor_is_recorded_by_its_fields(tmp_path):
    theirs = hf_model(
        "DeepseekV3", q_lora_rank=None, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    )
    theirs.save_pretrained(tmp_path / "in")
    convert(Convert(str(tmp_path / "in"), str(tmp_path / "ours")))
    config = titan_moe.load_hf(tmp_path / "in").config
    saved = json.loads((tmp_path / "ours/step-0/state.json").read_text())["extra"]["config"]["model"]
    again = models.config(saved["name"], saved["flavor"], **saved["override"])
    assert again == config
    model = models.from_config(again, seed=None)
    load_weights(model, tmp_path / "ours")
    assert torch.equal(model.eval()(TOKENS), titan_moe.load_hf(tmp_path / "in").eval()(TOKENS))


def test_large_tensors_are_stored_in_chunks(qwen, tmp_path, monkeypatch):
    from titan_moe.convert import stream

    monkeypatch.setattr(stream, "_CHUNK_BYTES", 10_000)
    convert(Convert(str(qwen), str(tmp_path / "ours")))
    saved = stream.SavedWeights(tmp_path / "ours")
    assert len(saved._index.state_dict_metadata["model.layers.0.mlp.experts.w1"].chunks) == 8
    convert(Convert(str(tmp_path / "ours"), str(tmp_path / "out")))
    assert equal(tensors_of(tmp_path / "out"), load_file(qwen / "model.safetensors"))
    model = titan_moe.load_hf(qwen)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    load_weights(model, tmp_path / "ours")
    assert equal(model.state_dict(), expected)


def test_a_config_that_lies_about_the_weights_is_refused(qwen, tmp_path):
    edit_config(qwen, num_experts=7)
    with pytest.raises(CheckpointError, match=r"gate\.weight: shape \[8, 64\], expected \[7, 64\]"):
        convert(Convert(str(qwen), str(tmp_path / "ours")))
    assert not (tmp_path / "ours").exists()


@pytest.mark.slow
def test_memory_is_that_of_single_tensors(tmp_path):
    # 1 GB in stacks of 50 MB and two tables of 67 MB.
    measured = load_benchmark("convert_memory").run(tmp_path / "run", 1.0, dim=1024, vocab_size=32768, hidden_dim=192)
    # The program alone takes 0.4 GB; 256 MB of files stay mapped; then a stack, a chunk of it and its copy.
    for direction in ("there", "back"):
        assert measured[f"{direction}_peak"] < 0.95e9 < measured["bytes"]
