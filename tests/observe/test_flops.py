from types import SimpleNamespace

import pytest
import torch

from titan_moe.moe.config import MoEConfig
from titan_moe.observe import flops, flops_per_token, peak_flops


def deepseek_v3(**changes) -> SimpleNamespace:
    fields = {
        "vocab_size": 129280,
        "dim": 7168,
        "num_layers": 61,
        "num_heads": 128,
        "num_kv_heads": 128,
        "head_dim": 192,
        "ffn_dim": 18432,
        "num_dense_layers": 3,
        "mtp_depth": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe": MoEConfig(7168, 2048, 256, 8, shared_hidden_dim=2048),
    }
    return SimpleNamespace(**fields | changes)


def tiny(**changes) -> SimpleNamespace:
    fields = {
        "vocab_size": 100,
        "dim": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 3,
        "ffn_dim": 20,
        "num_dense_layers": 1,
        "mtp_depth": 0,
        "moe": MoEConfig(8, 5, 6, 2),
    }
    return SimpleNamespace(**fields | changes)


# TFLOPS per GPU and tokens per second and GPU, published for DeepSeek-V3 at 4,096 tokens (the report's Table 11).
@pytest.mark.parametrize(("tflops", "tokens"), [(1233, 4730), (1048, 4020), (368, 1412)])
def test_deepseek_v3_agrees_with_the_published_throughput(tflops, tokens):
    # Both figures are rounded to 3 or 4 digits, and the report's own formula differs by its small terms.
    assert flops_per_token(deepseek_v3(), 4096) == pytest.approx(tflops * 1e12 / tokens, rel=3e-3)


def active_parameters(config: SimpleNamespace) -> float:
    """From the FLOPs with next to no attention scores: 6 per weight."""
    return flops_per_token(config, 1) / 6 + config.vocab_size * config.dim


def test_active_parameters_are_the_published_ones():
    assert active_parameters(deepseek_v3(mtp_depth=0)) == pytest.approx(37.5e9, rel=0.01)
    qwen = tiny(
        vocab_size=151936,
        dim=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        num_dense_layers=0,
        moe=MoEConfig(4096, 1536, 128, 8),
    )
    assert active_parameters(qwen) == pytest.approx(22.2e9, rel=0.01)


def test_a_tiny_model_by_hand():
    attention = 8 * 12 + 2 * 8 * 6 + 12 * 8
    dense, moe, head = 3 * 8 * 20, 2 * 3 * 8 * 5, 8 * 100
    # Causal scores over 10 tokens: 5 keys on average, 2 FLOPs each for Q K and for P V, 4 heads of 3 dims.
    scores = 2 * (5 * 2 * 4 * 3 * 2)
    assert flops_per_token(tiny(), 10) == 3 * (2 * (2 * attention + dense + moe + head) + scores)


def test_parts_that_a_variant_adds_by_hand():
    base = flops_per_token(tiny(), 10)
    shared = tiny(moe=MoEConfig(8, 5, 6, 2, shared_hidden_dim=7))
    assert flops_per_token(shared, 10) - base == 6 * 3 * 8 * 7
    ungated = tiny(moe=MoEConfig(8, 5, 6, 2, activation="relu2"))
    assert base - flops_per_token(ungated, 10) == 6 * 2 * 8 * 5
    latent = tiny(moe=MoEConfig(8, 5, 6, 2, latent_dim=4))
    assert flops_per_token(latent, 10) - base == 6 * (2 * 8 * 4 - 2 * 3 * 4 * 5)
    mtp = flops_per_token(tiny(mtp_depth=1), 10) - base
    assert mtp == 6 * (288 + 2 * 3 * 8 * 5 + 2 * 8 * 8 + 8 * 100) + 3 * 120 * 2


def test_sliding_windows_count_the_keys_they_see():
    base = flops_per_token(tiny(), 10)
    # A window of 4 in 10 tokens sees 4 - 16 / 20 = 3.2 keys on average, by the same halving as the 5 of the whole.
    windowed = tiny(sliding_window=4)
    assert base - flops_per_token(windowed, 10) == pytest.approx(3 * 2 * (5 - 3.2) * 2 * 4 * 6)
    every_second = tiny(sliding_window=4, full_attention_every=2)
    assert base - flops_per_token(every_second, 10) == pytest.approx(3 * (5 - 3.2) * 2 * 4 * 6)
    assert flops_per_token(tiny(sliding_window=64), 10) == base


def test_queries_without_a_latent():
    with_latent, without = deepseek_v3(), deepseek_v3(q_lora_rank=None)
    change = 62 * (7168 * 128 * 192 - 7168 * 1536 - 1536 * 128 * 192)
    assert flops_per_token(without, 4096) - flops_per_token(with_latent, 4096) == pytest.approx(6 * change)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA TITAN V", None),
    ],
)
def test_peak_by_device_name(monkeypatch, name, peak):
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu")) is None
