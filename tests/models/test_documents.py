"""Packed documents: attention stays inside each, windows and sinks included."""

import pytest
import torch

from titan_moe import models

TINY = {"dim": 32, "num_layers": 2, "hidden_dim": 16, "vocab_size": 40}
# Borders inside and on the edges of the pieces that the CPU cuts attention into.
LENGTHS = [5, 1, 58, 71, 121]


def _double(family: str, **override):
    torch.set_default_dtype(torch.float64)
    try:
        return models.build(family, "debug", init_std=0.3, **TINY, **override)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_packed_documents_give_the_logits_of_separate_passes(family):
    extra = {"sliding_window": 4} if family in ("gpt_oss", "mixtral") else {}
    model = _double(family, **extra).eval()
    ids = torch.randint(0, 40, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    document_ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    packed = model(ids, document_ids)
    separate = torch.cat([model(piece) for piece in ids.split(LENGTHS, dim=1)], dim=1)
    # Float64 rounding; positions differ by a shift, which rotary embeddings do not see.
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)
    # And the mask is what does it.
    assert (packed - model(ids)).abs().max() > 1e-3


def test_one_document_equals_plain_causal_attention():
    model = _double("qwen3_moe").eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(model(ids, torch.zeros_like(ids)), model(ids), rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_later_token_changes_no_earlier_logit(family):
    model = _double(family).eval()
    ids = torch.arange(20)[None]
    changed = ids.clone()
    changed[0, 12] = 39
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :12], before[:, :12], rtol=0, atol=1e-13)
    assert (after[:, 12:] - before[:, 12:]).abs().amin(-1).max() > 0


def test_a_window_of_one_layer_hides_tokens_that_far_back():
    model = _double("gpt_oss", sliding_window=3, full_attention_every=1000).eval()
    del model.layers["1"]
    ids = torch.arange(20)[None]
    changed = ids.clone()
    changed[0, 5] = 39
    moved = (model(ids) - model(changed)).abs().amax(-1)[0] > 1e-12
    assert moved.nonzero().flatten().tolist() == [5, 6, 7]


def test_padding_takes_no_part_in_the_moe_losses():
    ids = torch.arange(20)[None].repeat(2, 1)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[:, 13:] = False
    padded = ids.clone()
    padded[:, 13:] = 0
    grads = []
    for tokens in (ids, padded):
        model = _double("qwen3_moe", aux_loss_coef=1.0)
        logits = model(tokens, valid=valid)
        # No gradient but that of the balancing loss, of the first layer's router.
        (logits.sum() * 0).backward()
        grads.append(model.layers["0"].mlp.router.weight.grad)
    assert grads[0].any()
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-14)
