"""Multi-token-prediction layers: trained, or passed through an export."""

import json
import logging
import shutil

import pytest
import torch
from hf_tiny import edit_config, equal, rewrite, tensors_of

import titan_moe
from titan_moe import models
from titan_moe.errors import CheckpointError

TOKENS = torch.arange(32).view(2, 16)


@pytest.fixture
def with_mtp(tmp_path):
    """A DeepSeek-V3 of ours with two trained MTP layers, and its export."""
    ours = models.build("deepseek_v3", "debug", num_layers=2, mtp_depth=2)
    ours.mtp["1"].layer.mlp.router.expert_bias.normal_()
    titan_moe.save_hf(ours, tmp_path / "mtp")
    return ours, tmp_path / "mtp"


def test_mtp_layers_have_the_names_of_the_hub(with_mtp):
    ours, folder = with_mtp
    tensors = tensors_of(folder)
    for d, layer in ((0, "model.layers.2."), (1, "model.layers.3.")):
        mtp = ours.mtp[str(d)]
        for name, tensor in {
            "enorm.weight": mtp.enorm.weight,
            "hnorm.weight": mtp.hnorm.weight,
            "eh_proj.weight": mtp.eh_proj.weight,
            "shared_head.norm.weight": mtp.norm.weight,
            "shared_head.head.weight": ours.lm_head.weight,
            "embed_tokens.weight": ours.embed_tokens.weight,
            "self_attn.kv_b_proj.weight": mtp.layer.self_attn.kv_b_proj.weight,
            "mlp.experts.7.up_proj.weight": mtp.layer.mlp.experts.w1[7, 1],
            "mlp.gate.e_score_correction_bias": mtp.layer.mlp.router.expert_bias,
        }.items():
            assert torch.equal(tensors[layer + name], tensor), layer + name
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    again = titan_moe.load_hf(folder, mtp_depth=2)
    assert equal(again.state_dict(), ours.state_dict())


def test_mtp_layers_that_are_not_trained_are_reported_and_pass_through_an_export(with_mtp, tmp_path, caplog):
    ours, folder = with_mtp
    with caplog.at_level(logging.WARNING):
        main = titan_moe.load_hf(folder)
    assert "88 tensors of MTP layers are left out" in caplog.text
    assert len(main.mtp) == 0
    logits = main(TOKENS)
    assert torch.equal(logits, ours.eval()(TOKENS))
    titan_moe.save_hf(main, tmp_path / "out")
    assert equal(tensors_of(tmp_path / "out"), tensors_of(folder))
    # Onto its own source too, and with one layer trained.
    titan_moe.save_hf(titan_moe.load_hf(folder, mtp_depth=1), folder)
    assert equal(titan_moe.load_hf(folder, mtp_depth=2).state_dict(), ours.state_dict())


def test_integers_and_router_biases_pass_through_a_cast_untouched(with_mtp, tmp_path):
    folder = with_mtp[1]
    tensors = tensors_of(folder)
    tensors |= {
        "model.layers.3.steps": torch.tensor(2**53 + 1),
        "model.layers.3.ids": torch.arange(3, dtype=torch.int8),
    }
    rewrite(folder, tensors)
    titan_moe.save_hf(titan_moe.load_hf(folder), tmp_path / "out", dtype=torch.bfloat16)
    written = tensors_of(tmp_path / "out")
    for name in ("steps", "ids", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        before, after = tensors[f"model.layers.3.{name}"], written[f"model.layers.3.{name}"]
        assert after.dtype == before.dtype and torch.equal(after, before)
    assert written["model.layers.3.eh_proj.weight"].dtype == torch.bfloat16


def test_an_export_whose_source_is_gone_says_so_and_announces_no_mtp_layers(with_mtp, tmp_path, caplog):
    main = titan_moe.load_hf(with_mtp[1])
    shutil.rmtree(with_mtp[1])
    with caplog.at_level(logging.WARNING):
        titan_moe.save_hf(main, tmp_path / "out")
    assert "is gone: the export lacks the MTP layers" in caplog.text
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert equal(titan_moe.load_hf(tmp_path / "out").state_dict(), main.state_dict())


def test_mtp_layers_that_the_config_does_not_announce_are_unused_names(with_mtp):
    edit_config(with_mtp[1], num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"44 not used: model\.layers\.3\."):
        titan_moe.load_hf(with_mtp[1])
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.4\."):
        titan_moe.load_hf(with_mtp[1], mtp_depth=3)


def test_mtp_layers_with_their_own_embedding(tmp_path):
    ours = models.build("deepseek_v3", "debug", num_layers=2, mtp_depth=1, mtp_own_embeddings=True)
    titan_moe.save_hf(ours, tmp_path)
    again = titan_moe.load_hf(tmp_path, mtp_depth=1, mtp_own_embeddings=True)
    assert equal(again.state_dict(), ours.state_dict())
    with pytest.raises(CheckpointError, match=r"layers\.2\.embed_tokens\.weight: differs from embed_tokens\.weight"):
        titan_moe.load_hf(tmp_path, mtp_depth=1)
