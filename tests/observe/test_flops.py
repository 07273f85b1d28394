import pytest
import torch

from titan_moe.models import ModelConfig, config
from titan_moe.observe import flops, flops_per_token, peak_flops


def deepseek_v3(**changes) -> ModelConfig:
    return config("deepseek_v3", "671b", **{"mtp_depth": 1} | changes)


def tiny(**changes) -> ModelConfig:
    fields = {
        "vocab_size": 100,
        "dim": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn_dim": 20,
        "num_dense_layers": 1,
        "hidden_dim": 5,
        "num_experts": 6,
        "top_k": 2,
    }
    return config("mixtral", "debug", **fields | changes)


# TFLOPS per GPU and tokens per second and GPU, published for DeepSeek-V3 at 4,096 tokens (the report's Table 11).
@pytest.mark.parametrize(("tflops", "tokens"), [(1233, 4730), (1048, 4020), (368, 1412)])
def test_deepseek_v3_agrees_with_the_published_throughput(tflops, tokens):
    # Both figures are rounded to 3 or 4 digits, and the report's own formula differs by its small terms.
    assert flops_per_token(deepseek_v3(), 4096) == pytest.approx(tflops * 1e12 / tokens, rel=3e-3)


def test_a_tiny_model_by_hand():
    attention = 8 * 16 + 2 * 8 * 8 + 16 * 8
    dense, moe, head = 3 * 8 * 20, 2 * 3 * 8 * 5, 8 * 100
    # Causal scores over 10 tokens: 5 keys on average, 2 FLOPs each for Q K and for P V, 4 heads of 4 dims.
    scores = 2 * (5 * 2 * 4 * 4 * 2)
    assert flops_per_token(tiny(), 10) == 3 * (2 * (2 * attention + dense + moe + head) + scores)


def test_parts_that_a_variant_adds_by_hand():
    base = flops_per_token(tiny(), 10)
    assert flops_per_token(tiny(shared_hidden_dim=7), 10) - base == 6 * 3 * 8 * 7
    assert base - flops_per_token(tiny(activation="relu2"), 10) == 6 * 2 * 8 * 5
    assert flops_per_token(tiny(latent_dim=4), 10) - base == 6 * (2 * 8 * 4 - 2 * 3 * 4 * 5)
    mtp = flops_per_token(tiny(mtp_depth=1), 10) - base
    assert mtp == 6 * (384 + 2 * 3 * 8 * 5 + 2 * 8 * 8 + 8 * 100) + 3 * 160 * 2


def test_sliding_windows_count_the_keys_they_see():
    base = flops_per_token(tiny(), 10)
    # A window of 4 in 10 tokens sees 4 - 16 / 20 = 3.2 keys on average, by the same halving as the 5 of the whole.
    windowed = tiny(sliding_window=4)
    assert base - flops_per_token(windowed, 10) == pytest.approx(3 * 2 * (5 - 3.2) * 2 * 4 * 8)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    every, one = (config("gpt_oss", "debug", **sizes, full_attention_every=n, sliding_window=4) for n in (1, 2))
    assert flops_per_token(every, 10) - flops_per_token(one, 10) == pytest.approx(3 * (5 - 3.2) * 2 * 4 * 128)
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
