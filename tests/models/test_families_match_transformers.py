"""Logits, loss and gradients of every family against transformers' own implementation, in fp32 on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from hf_weights import to_ours, twins

from titan_moe.models import token_losses

_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
_DEEPSEEK_YARN = {**_YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7}
# Here the blend's upper end is 2.02 dims, so that rounding it up would show.
_GPT_OSS_YARN = {
    **_YARN,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def _ours(yarn: dict) -> dict:
    return {"rope_scaling": {k: v for k, v in yarn.items() if k != "rope_theta"}}


CASES = {
    "mixtral": ("mixtral", {}, {}),
    "mixtral_window": ("mixtral", {"sliding_window": 5}, {"sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "qwen3_moe_tied_head": ("qwen3_moe", {"tie_word_embeddings": True}, {"tie_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "deepseek_v3_full_rank_queries": ("deepseek_v3", {"q_lora_rank": None}, {"q_lora_rank": None}),
    "deepseek_v3_half_rotation": ("deepseek_v3", {"rope_interleave": False}, {"rope_interleaved": False}),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_parameters": _DEEPSEEK_YARN}, _ours(_DEEPSEEK_YARN)),
    "gpt_oss": ("gpt_oss", {}, {}),
    "gpt_oss_yarn": ("gpt_oss", {"rope_parameters": _GPT_OSS_YARN}, _ours(_GPT_OSS_YARN)),
    "glm4_moe": ("glm4_moe", {}, {}),
    "glm4_moe_attention_bias": ("glm4_moe", {"attention_bias": True}, {"attention_bias": True}),
    "glm4_moe_without_qk_norm": ("glm4_moe", {"use_qk_norm": False}, {"qk_norm": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("kernels")
def test_logits_loss_and_gradients_equal_transformers(case):
    _compare(*CASES[case], seq_len=24)


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral_window"])
@pytest.mark.usefixtures("kernels")
def test_sequences_long_enough_to_be_cut_equal_transformers(case):
    _compare(*CASES[case], seq_len=128)


def _compare(family: str, hf_extra: dict, ours_extra: dict, seq_len: int) -> None:
    hf, ours = twins(family, hf_extra, ours_extra)
    ids = torch.randint(3, 128, (2, seq_len), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100

    hf_logits = hf(ids).logits
    hf_loss = F.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    hf_loss.backward()
    logits = ours(ids)
    loss = token_losses(logits, labels).total / (labels != -100).sum()
    loss.backward()

    # The bounds promised for fp32; two implementations differ by rounding only.
    torch.testing.assert_close(logits, hf_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, hf_loss, rtol=0, atol=1e-6)
    expected = dict(to_ours(family, n, p.grad) for n, p in hf.named_parameters() if p.grad is not None)
    actual = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        error = (grad - expected[name]).norm() / expected[name].norm()
        assert error < 1e-4, f"{name}: relative gradient error {error:.2e}"
