"""What is read, and what is refused with which words."""

import json
import os

import pytest
import torch
from hf_tiny import edit_config, equal, hf_model, rewrite, tensors_of
from safetensors.torch import load_file, save_file

import titan_moe
from titan_moe import models
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.hf import load_hf_weights

TOKENS = torch.arange(32).view(2, 16)


def test_sharded_files_and_old_rotary_tables(qwen, tmp_path):
    whole = tensors_of(qwen)
    hf_model("Qwen3Moe").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert equal(dict(titan_moe.iter_hf_tensors(titan_moe.load_hf(tmp_path / "shards"))), whole)

    rewrite(qwen, whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert equal(dict(titan_moe.iter_hf_tensors(titan_moe.load_hf(qwen))), whole)

    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: missing, though the index names it"):
        titan_moe.load_hf(tmp_path / "shards")


def test_an_index_that_does_not_match_its_shards_is_refused(tmp_path):
    hf_model("Qwen3Moe").save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    for change, message in (
        ({"model.ghost.weight": original["weight_map"]["lm_head.weight"]}, "lacks model.ghost.weight"),
        ({"lm_head.weight": "../model.safetensors"}, "not a plain file name"),
    ):
        index.write_text(json.dumps({"weight_map": original["weight_map"] | change}))
        with pytest.raises(CheckpointError, match=message):
            titan_moe.load_hf(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        titan_moe.load_hf(tmp_path)


def test_paths_that_are_no_checkpoint(qwen, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        titan_moe.load_hf(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        titan_moe.load_hf(qwen / "config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        titan_moe.load_hf(tmp_path)
    (qwen / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        titan_moe.load_hf(qwen)
    (qwen / "config.json").write_text("{oops")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        titan_moe.load_hf(qwen)
    with pytest.raises(CheckpointError, match="Linear: not a transformers model"):
        titan_moe.load_hf(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("size", [0, 5, 1000, -1000])
def test_a_truncated_file_is_one_line_with_its_name(size, qwen):
    file = qwen / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or not a safetensors file") as error:
        titan_moe.load_hf(qwen)
    assert "\n" not in str(error.value)


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def entry(first, end, shape=(2,)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [first, end]}


HOSTILE = {
    "a length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "a length beyond reason": b"\xff" * 8 + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"oops",
    "not UTF-8": (4).to_bytes(8, "little") + b"\xff\xfe{}",
    "deep nesting": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "negative offsets": header(x=entry(-8, 0)) + bytes(8),
    "offsets beyond the file": header(x=entry(0, 8)) + bytes(4),
    "overlapping offsets": header(x=entry(0, 8), y=entry(4, 12)) + bytes(12),
    "a gap": header(x=entry(0, 8), y=entry(16, 24)) + bytes(24),
    "offsets that do not fit the shape": header(x=entry(0, 12)) + bytes(12),
    "a huge shape": header(x=entry(0, 8, (2**62, 2**62))) + bytes(8),
    "a negative shape": header(x=entry(0, 8, (-2,))) + bytes(8),
    "an unknown dtype": header(x={"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}) + bytes(8),
    "bytes behind the last tensor": header(x=entry(0, 8)) + bytes(64),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_header_is_refused_with_the_files_name(fault, qwen):
    (qwen / "model.safetensors").write_bytes(HOSTILE[fault])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or not a safetensors file") as error:
        titan_moe.load_hf(qwen)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_names_held_twice_are_listed(qwen, tmp_path):
    whole = tensors_of(qwen)
    stacked = torch.stack([whole[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(8)])
    rewrite(qwen, whole | {"model.layers.0.mlp.experts.down_proj": stacked})
    message = r"1 held a second time, in another layout: model\.layers\.0\.mlp\.experts\.down_proj\."
    with pytest.raises(CheckpointError, match=message):
        titan_moe.load_hf(qwen)

    hf_model("Qwen3Moe").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    name = "model.norm.weight"
    holder = next(shard for shard in shards if name in load_file(shard))
    other = next(shard for shard in shards if shard != holder)
    save_file(load_file(other) | {name: torch.ones(64)}, other, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{other.name}: holds, like {holder.name}: {name}"):
        titan_moe.load_hf(tmp_path / "shards")
    index = tmp_path / "shards/model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{"{name}": "{other.name}", "{name}": "{holder.name}"}}}}')
    with pytest.raises(CheckpointError, match=f"1 names come twice: {name}"):
        titan_moe.load_hf(tmp_path / "shards")


def test_a_wrong_shape_names_the_tensor_and_both_shapes(qwen):
    tensors = tensors_of(qwen)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    rewrite(qwen, tensors | {name: tensors[name].T.contiguous()})
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight: shape \[32, 64\], expected \[64, 32\]"):
        titan_moe.load_hf(qwen)
    rewrite(qwen, tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight: is torch\.int8, expected floats"):
        titan_moe.load_hf(qwen)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "qwen3_mo"}, "model_type = 'qwen3_mo' is not supported. Did you mean 'qwen3_moe'"),
        ({"model_type": None}, "model_type = None is not supported. Known: deepseek_v2, deepseek_v3, glm4_moe"),
        ({"model_type": "qwen4_moe"}, "model_type = 'qwen4_moe' is not supported. Known: deepseek_v2"),
        ({"model_type": "deepseek_v4"}, "model_type = 'deepseek_v4' is not supported. Known: deepseek_v2"),
        ({"model_type": "qwen3"}, "It has no experts: titan-moe upcycle makes"),
        ({"model_type": "qwen3_next"}, "Our models do not have gated DeltaNet layers, attention with an output gate"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, r"config\.json: a value has the wrong type"),
        ({"rope_parameters": 10000}, r"config\.json: a value has the wrong type"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [1]}, "only leading layers"),
        ({"num_experts_per_tok": 9}, "top_k = 9 is more than num_experts = 8"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
    ],
)
def test_a_config_that_would_be_misread_is_refused(changes, message, qwen):
    edit_config(qwen, **changes)
    with pytest.raises(ConfigError, match=message):
        titan_moe.load_hf(qwen)


def test_layer_types_of_gpt_oss_in_another_pattern_are_refused():
    model = hf_model("GptOss", layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ConfigError, match="full attention must come in every n-th layer"):
        titan_moe.load_hf(model)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(qwen):
    edit_config(qwen, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from embed_tokens\.weight"):
        titan_moe.load_hf(qwen)


def test_overrides_reach_the_model_and_unknown_ones_are_refused(qwen):
    assert titan_moe.load_hf(qwen, aux_loss_coef=0.01, experts="sequential").config.moe.aux_loss_coef == 0.01
    with pytest.raises(ConfigError, match=r"aux_los_coef.*Did you mean 'aux_loss_coef'"):
        titan_moe.load_hf(qwen, aux_los_coef=0.01)


def test_a_dtype_that_weights_cannot_have_is_refused(qwen, tmp_path):
    for dtype in (torch.int8, torch.float8_e4m3fn, "bfloat16"):
        with pytest.raises(ConfigError, match=r"dtype = .*must be one of None, torch\.float64"):
            titan_moe.load_hf(qwen, dtype)
        with pytest.raises(ConfigError, match=r"dtype = .*must be one of None, torch\.float64"):
            titan_moe.save_hf(titan_moe.load_hf(qwen), tmp_path / "out", dtype)


def test_a_model_that_differs_from_the_checkpoints_config_is_told_so(qwen, caplog):
    ours = titan_moe.load_hf(qwen, rope_theta=5e5, top_k=3, aux_loss_coef=0.1)
    with caplog.at_level("WARNING"):
        load_hf_weights(ours, qwen)
    assert [record.getMessage() for record in caplog.records] == [
        "rope_theta = 500000.0, but the checkpoint's config.json has 10000.0.",
        "top_k = 3, but the checkpoint's config.json has 2.",
    ]


def test_weights_go_into_an_existing_model_in_its_dtype(qwen):
    ours = titan_moe.load_hf(qwen).double()
    expected = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    load_hf_weights(ours, qwen)
    assert equal(ours.state_dict(), expected)
    assert ours.lm_head.weight.dtype == torch.float64
    with pytest.raises(CheckpointError, match="not fit"):
        load_hf_weights(models.build("qwen3_moe", "debug"), qwen)
