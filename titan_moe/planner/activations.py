"""What one micro-batch keeps for its backward pass, tensor by tensor (report sections 4.1.1 to 4.1.5).

A row is one saved tensor on one rank: its shape, the bytes of an element, why it is kept, which recompute target and
which offload target remove it. The rows of a DeepSeek-V3 layer add up to the 2,236 MiB per 4,096 tokens from which the
report's Table 3 follows. Written in the part of Python that ``to_js`` translates.

``run`` is a ``titan_moe.planner.run.Run``, ``s`` a ``titan_moe.models.count.Shape``. Under tensor parallelism the
residual stream is cut along the sequence, and heads and hidden dims along the rank.
"""

from titan_moe.planner.own_activations import FIRST_LINEAR, own_head_rows, own_layer_rows, own_mtp_rows
from titan_moe.planner.rows import held_rows, tokens_of

BF16 = 2
FP32 = 4


def stored(precision: str) -> float:
    """Bytes of an element of a linear layer's saved input, scales included."""
    if precision == "fp8_block":
        return 1 + 4 / 128
    if precision == "mxfp8":
        return 1 + 1 / 32
    if precision == "nvfp4":
        return 0.5 + 1 / 16
    return BF16


def row(name: str, tokens: float, width: float, size: float, why: str, recompute: str, offload: str) -> dict:
    """One saved tensor ``[tokens, width]``; the targets are empty where nothing but "full" removes it."""
    return {
        "name": name,
        "tokens": tokens,
        "width": width,
        "size": size,
        "bytes": tokens * width * size,
        "why": why,
        "recompute": recompute,
        "offload": offload,
    }


def attention_rows(s: object, run: object) -> list:
    """Saved tensors of the norm and the attention of a layer."""
    T = tokens_of(run)
    t = T / run.tp
    f = stored(run.precision)
    rows = [
        row("input", t, s.dim, BF16, "backward of the norm", "", "attn_norm"),
        row("norm", t, s.dim, f, "weight gradient of the projections", "layernorm", "qkv_linear"),
    ]
    if s.latent:
        if s.q_lora > 0:
            rows.append(row("q_down", t, s.q_lora, BF16, "backward of the latent's norm", "", ""))
            rows.append(row("q_norm", t, s.q_lora, f, "weight gradient of q_up", "layernorm", ""))
        rows.append(row("kv_down", t, s.kv_lora, BF16, "backward of the latent's norm", "", ""))
        rows.append(row("kv_norm", t, s.kv_lora, f, "weight gradient of kv_up", "layernorm", ""))
    if s.qk_norm:
        rows.append(row("q before norm", T, s.heads * s.d_qk / run.tp, BF16, "backward of the head norm", "", ""))
        rows.append(row("k before norm", T, s.kv_heads * s.d_qk / run.tp, BF16, "backward of the head norm", "", ""))
    up = "mla_up_proj" if s.latent else ""
    heads = s.heads if s.latent else s.kv_heads
    rows.append(row("q", T, s.heads * s.d_qk / run.tp, BF16, "backward of attention", up, "core_attn"))
    rows.append(row("k", T, heads * s.d_qk / run.tp, BF16, "backward of attention", up, "core_attn"))
    rows.append(row("v", T, heads * s.d_v / run.tp, BF16, "backward of attention", up, "core_attn"))
    width = s.heads * s.d_v / run.tp
    rows.append(row("attention out", T, width, BF16, "backward of attention and of out", "core_attn", "core_attn"))
    if run.precision != "bf16":
        rows.append(row("attention out, low", T, width, f, "weight gradient of out", "", "attn_proj"))
    rows.append(row("lse", T, s.heads / run.tp, FP32, "softmax of attention", "core_attn", ""))
    rows.append(row("residual", t, s.dim, BF16, "backward of the second norm", "", "mlp_norm"))
    return rows


def moe_rows(s: object, run: object) -> list:
    """Saved tensors of the second norm and the MoE part of a layer."""
    T = tokens_of(run)
    t = T / run.tp
    f = stored(run.precision)
    R = held_rows(s, run)
    hidden = s.expert_hidden / run.etp
    rows = [row("mlp norm", t, s.dim, BF16, "weight gradient of the router", "layernorm", "")]
    rows.append(row("router probs", t, s.experts, BF16, "backward of the scores", "moe", ""))
    rows.append(row("row map", t, s.experts, 8, "backward of the permutation", "moe", ""))
    if s.shared_hidden > 0:
        width = s.shared_hidden / run.tp
        if run.precision != "bf16":
            rows.append(row("mlp norm, low", t, s.dim, f, "weight gradient of the shared expert", "shared_experts", ""))
        rows.append(row("shared fc1", T, s.halves * width, BF16, "backward of the activation", "shared_experts", ""))
        rows.append(row("shared act", T, width, f, "weight gradient of the shared expert", "shared_experts", ""))
    if s.latent_dim > 0:
        rows.append(row("latent", t, s.latent_dim, f, "weight gradient of latent_up", "moe", ""))
    rows.append(row("permuted input", R, s.expert_dim, f, "weight gradient of fc1", "moe", "expert_fc1"))
    width = s.halves * hidden
    if run.moe_save == "preact_fp8":
        rows.append(row("fc1, low", R, width, 1, "backward of the activation", "moe", "moe_act"))
        rows.append(row("fc1 scales", R, -(-width // 128), FP32, "backward of the activation", "moe", "moe_act"))
    else:
        again = FIRST_LINEAR if run.moe_save == "input" else "moe"
        rows.append(row("fc1", R, width, BF16, "backward of the activation", again, "moe_act"))
    again = FIRST_LINEAR if run.moe_save == "input" else "moe_act"
    rows.append(row("act", R, hidden, f, "weight gradient of fc2", again, ""))
    if not run.memory_efficient_permutation:
        rows.append(row("unpermuted", R, s.expert_dim, BF16, "gradient of the routing weights", "moe", ""))
    return rows


def dense_rows(s: object, run: object) -> list:
    """Saved tensors of the second norm and the dense feed-forward of a layer."""
    T = tokens_of(run)
    f = stored(run.precision)
    return [
        row("mlp norm", T / run.tp, s.dim, f, "weight gradient of fc1", "layernorm", ""),
        row("dense fc1", T, 2 * s.ffn / run.tp, BF16, "backward of the activation", "mlp", ""),
        row("dense act", T, s.ffn / run.tp, f, "weight gradient of fc2", "mlp", ""),
    ]


def layer_rows(s: object, run: object, dense: bool) -> list:
    """All saved tensors of one decoder layer, nothing removed yet."""
    if run.engine == "titan":
        return own_layer_rows(s, run, dense)
    rows = attention_rows(s, run)
    for saved in dense_rows(s, run) if dense else moe_rows(s, run):
        rows.append(saved)
    return rows


def head_rows(s: object, run: object) -> list:
    """Saved tensors of the final norm, the head and the loss, for one set of logits."""
    if run.engine == "titan":
        return own_head_rows(s, run)
    T = tokens_of(run)
    t = T / run.tp
    return [
        row("final input", t, s.dim, BF16, "backward of the final norm", "", ""),
        row("final norm", t, s.dim, BF16, "weight gradient of the head", "", ""),
        row("logits", T, s.vocab / run.tp, BF16, "backward of the loss", "", ""),
    ]


def mtp_rows(s: object, run: object) -> list:
    """Saved tensors of one MTP depth beside its decoder layer."""
    if run.engine == "titan":
        return own_mtp_rows(s, run)
    t = tokens_of(run) / run.tp
    return [
        row("mtp embedding", t, s.dim, BF16, "backward of its norm", "", ""),
        row("mtp hidden", t, s.dim, BF16, "backward of its norm", "", ""),
        row("mtp joined", t, 2 * s.dim, stored(run.precision), "weight gradient of the projection", "", ""),
    ]


def fate(saved: dict, run: object) -> str:
    """``kept``, ``recomputed`` or ``offloaded``."""
    if saved["recompute"] == FIRST_LINEAR or ("full" in run.recompute and saved["name"] != "input"):
        return "recomputed"
    if saved["recompute"] != "":
        if saved["recompute"] in run.recompute:
            return "recomputed"
        inner = saved["recompute"] == "moe_act" or saved["recompute"] == "shared_experts"
        if inner and run.engine == "megatron" and "moe" in run.recompute:
            return "recomputed"
    if saved["offload"] != "" and saved["offload"] in run.offload and saved["bytes"] >= run.offload_least:
        return "offloaded"
    return "kept"


def bytes_with(rows: list, run: object, wanted: str) -> float:
    """Bytes of the rows that share one fate; of what is offloaded, the share that does not travel is kept."""
    total = 0
    for saved in rows:
        found = fate(saved, run)
        if found == "offloaded" and wanted != "recomputed":
            total += saved["bytes"] * (run.offload_fraction if wanted == "offloaded" else 1 - run.offload_fraction)
        elif found == wanted:
            total += saved["bytes"]
    return total


def all_bytes(rows: list) -> float:
    """Bytes of all rows."""
    total = 0
    for saved in rows:
        total += saved["bytes"]
    return total
