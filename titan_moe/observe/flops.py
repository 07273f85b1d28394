"""Model FLOPs per token, and the peak of the device they are held against."""

from typing import Any

import torch

# Dense bf16 peaks in FLOP/s, by a part of the device's name. A longer name comes before its own prefix.
PEAK_BF16 = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI355X", 2500e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of ``device`` in FLOP/s, or None where it is not known (CPU, other accelerators)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16 if part in name), None)


def flops_per_token(model_config: Any, seq_len: int) -> float:
    """FLOPs of one training step per token: three times the forward pass.

    A matrix product of n weights costs 2n per token. Causal attention is counted at half of the full square.
    Of the routed experts only the top k count; the router, norms and the embedding look-up do not. Nor does
    recomputation: these are model FLOPs, as in the report's Table 11.

    Args:
        model_config: a model family's configuration.
        seq_len: tokens per sequence.
    """
    c = model_config
    windows = [_window(c, layer) for layer in range(c.num_layers)]
    projections, moe, dense = _attention_weights(c), _moe_weights(c), 3 * c.dim * c.ffn_dim
    moe_layers = c.num_layers - c.num_dense_layers
    head = c.dim * c.vocab_size
    weights = c.num_layers * projections + moe_layers * moe + c.num_dense_layers * dense + head
    # One MTP depth: its decoder layer, the projection of [hidden, embedding] to hidden, and its own logits.
    weights += c.mtp_depth * (projections + moe + 2 * c.dim * c.dim + head)
    windows += [None] * c.mtp_depth
    return 3.0 * (2 * weights + sum(_attention_scores(c, seq_len, window) for window in windows))


def _is_mla(c: Any) -> bool:
    return bool(getattr(c, "kv_lora_rank", None))


def _attention_weights(c: Any) -> int:
    """Weights of the attention's linear layers."""
    if not _is_mla(c):
        return c.dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    d_qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    if c.q_lora_rank:
        query = c.dim * c.q_lora_rank + c.q_lora_rank * c.num_heads * d_qk
    else:
        query = c.dim * c.num_heads * d_qk
    key_value_down = c.dim * (c.kv_lora_rank + c.qk_rope_head_dim)
    key_value_up = c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return query + key_value_down + key_value_up + c.num_heads * c.v_head_dim * c.dim


def _attention_scores(c: Any, seq_len: int, window: int | None) -> float:
    """Forward FLOPs per token of Q K^T and of the weighted sum of V, averaged over a causal sequence."""
    d_qk = c.qk_nope_head_dim + c.qk_rope_head_dim if _is_mla(c) else c.head_dim
    d_v = c.v_head_dim if _is_mla(c) else c.head_dim
    width = min(window or seq_len, seq_len)
    keys = width - width * width / (2 * seq_len)
    return 2 * keys * c.num_heads * (d_qk + d_v)


def _moe_weights(c: Any) -> int:
    """Weights of one MoE layer that a token meets: top-k experts, shared expert, latent projections."""
    m = c.moe
    linears = 3 if m.gated else 2
    weights = m.top_k * linears * m.expert_dim * m.hidden_dim + linears * m.dim * m.shared_hidden_dim
    if m.latent_dim:
        weights += 2 * m.dim * m.latent_dim
    return weights


def _window(c: Any, layer: int) -> int | None:
    """Keys that the layer's attention reaches back, or None for the whole sequence."""
    every = getattr(c, "full_attention_every", None)
    if every and (layer + 1) % every == 0:
        return None
    return getattr(c, "sliding_window", None)
