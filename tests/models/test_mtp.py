"""Multi-token prediction against transformers' own MTP layers, and its limits at document borders."""

import pytest
import torch
import torch.nn.functional as F
from hf_weights import to_ours, twins
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from titan_moe import models
from titan_moe.moe.balance import finish_step

TINY = {"dim": 32, "num_layers": 2, "hidden_dim": 16, "vocab_size": 40}


def _mtp_twins() -> tuple[torch.nn.Module, torch.nn.ModuleList, models.Decoder]:
    hf, plain = twins("deepseek_v3")
    # Layer index 1 is an MoE layer in this config, as MTP layers are.
    blocks = torch.nn.ModuleList(MtpLayer(hf.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, 1) for _ in range(2))
    with torch.no_grad():
        for name, parameter in blocks.named_parameters():
            parameter.normal_(0, 0.5 if name.endswith("gate.weight") else 0.05)
        for name, buffer in blocks.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    ours = models.from_config(models.spec.override_config(plain.config, {"mtp_depth": 2}))
    state = plain.state_dict()
    for depth, block in enumerate(blocks):
        for name, value in block.state_dict().items():
            name = name.replace("mtp_block.", "layer.").replace("post_norm.", "norm.")
            name, value = to_ours("deepseek_v3", name, value)
            state[f"mtp.{depth}.{name}"] = value
    ours.load_state_dict(state, strict=True)
    return hf, blocks, ours.train()


def test_mtp_logits_equal_transformers():
    hf, blocks, ours = _mtp_twins()
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    hidden = hf.model(ids).last_hidden_state
    mask = torch.full((24, 24), float("-inf")).triu(1)[None, None]
    tables = hf.model.rotary_emb(hidden, torch.arange(24)[None])
    outputs = ours(ids)
    assert len(outputs) == 3
    for depth, block in enumerate(blocks, start=1):
        embedded = hf.model.embed_tokens(F.pad(ids[:, depth:], (0, depth)))
        hidden = block(embedded, hidden, position_embeddings=tables, attention_mask=mask, position_ids=None, cache=None)
        expected = hf.lm_head(hidden)
        # Rounding of fp32; the last positions look past the end.
        torch.testing.assert_close(outputs[depth][:, :-depth], expected[:, :-depth], rtol=0, atol=1e-5)


def test_evaluation_leaves_mtp_out():
    model = models.build("deepseek_v3", "debug", **TINY, mtp_depth=2)
    ids = torch.arange(12)[None]
    main, *rest = model.train()(ids)
    assert len(rest) == 2
    assert torch.equal(model.eval()(ids), main)


def test_own_embeddings_are_used_by_their_depth_only():
    model = models.build("deepseek_v3", "debug", **TINY, mtp_depth=2, mtp_own_embeddings=True)
    outputs = model(torch.arange(12)[None])
    outputs[1].sum().backward()
    assert model.mtp["0"].embed_tokens.weight.grad.any() and model.mtp["0"].lm_head.weight.grad.any()
    assert model.mtp["1"].lm_head.weight.grad is None and model.lm_head.weight.grad is None


def test_mtp_sees_no_token_of_another_document():
    torch.set_default_dtype(torch.float64)
    try:
        model = models.build("deepseek_v3", "debug", **TINY, mtp_depth=2, init_std=0.3)
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.arange(20)[None]
    document_ids = (ids >= 9).long()
    packed = model(ids, document_ids)
    for first, last in ((0, 9), (9, 20)):
        alone = model(ids[:, first:last])
        for depth in range(3):
            # Equal even where there is no label: the embedding past the end is that of token 0 in both.
            torch.testing.assert_close(packed[depth][:, first:last], alone[depth], rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded, expected", [(False, (36, 33, 30)), (True, (29, 26, 23))])
def test_positions_without_a_token_ahead_count_for_no_expert(padded, expected):
    model = models.build("deepseek_v3", "debug", **TINY, mtp_depth=2)
    ids = torch.arange(12).repeat(3, 1)
    valid = None
    if padded:
        valid = torch.ones_like(ids, dtype=torch.bool)
        valid[2, 5:] = False
    sum(output.sum() for output in model(ids, valid=valid)).backward()
    counts = finish_step(model)
    routed = {name.split(".mlp")[0]: n for name, n in zip(counts["names"], counts["routed_L"].tolist(), strict=True)}
    # Three sequences of 12, one of them with 5 real tokens; each token ahead costs each one. Top-2 counts twice.
    assert routed == dict(zip(("layers.1", "mtp.0.layer", "mtp.1.layer"), (2 * n for n in expected), strict=True))
