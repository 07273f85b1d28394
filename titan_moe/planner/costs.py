"""Seconds of one layer, op by op: a roofline with measured efficiencies.

A product of ``m x k`` and ``k x n`` runs at ``peak * e * m / (m + half) * w / (w + half)`` with ``w = min(n, k)``:
small tiles fill the chip badly. Attention runs at the rates of the report's Table 9, interpolated in the logarithm of
the sequence length. Everything else is bytes over the memory's bandwidth. The backward pass is twice the forward one,
half of it gradients of weights; that of attention is 2.5 times. Written in the part of Python that ``to_js``
translates. ``y`` is a ``systems.System``.
"""

from math import log2

from titan_moe.models.count import attention_gemms, keys_per_query, score_flops
from titan_moe.planner.activations import BF16, FP32, stored
from titan_moe.planner.collectives import exchange, link, ring
from titan_moe.planner.rows import routed_rows, tokens_of

FORWARD_KERNELS = 60
BACKWARD_KERNELS = 100
GRAPHED = 0.35
"""Share of a layer's launches that stays outside the captured attention, router and preprocessing."""


def gemm(y: object, precision: str, m: float, k: float, n: float) -> float:
    """Seconds of one product of ``m`` rows."""
    if m <= 0 or k <= 0 or n <= 0:
        return 0
    peak = y.peak_bf16 * y.gemm_bf16
    if precision == "nvfp4":
        peak = y.peak_fp4 * y.gemm_fp4
    elif precision != "bf16":
        peak = y.peak_fp8 * y.gemm_fp8
    w = min(n, k)
    return 2 * m * k * n / (peak * m / (m + y.gemm_half) * w / (w + y.gemm_half))


def attention_rate(y: object, seq: float, backward: bool) -> float:
    """FLOPs per second of fused attention."""
    short = y.sdpa_backward_4k if backward else y.sdpa_forward_4k
    long = y.sdpa_backward_16k if backward else y.sdpa_forward_16k
    at = min(1, max(0, log2(seq / 4096) / 2))
    # Below the measured range the rate falls with the work per tile.
    return (short + (long - short) * at) * min(1, max(seq / 4096, 1 / 16) ** 0.25)


def attention_seconds(s: object, run: object, y: object, window: float, backward: bool) -> float:
    """Seconds of the scores and the weighted sum of one layer; the backward pass has 2.5 times the products."""
    keys = keys_per_query(run.seq, window, run.causal, run.lengths)
    flops = score_flops(s, keys) * tokens_of(run) / run.tp * (2.5 if backward else 1)
    longest = run.seq
    if len(run.lengths) > 0:
        longest = max(run.lengths)
    if window > 0:
        longest = min(longest, window)
    return flops / attention_rate(y, longest, backward)


def linear_seconds(s: object, run: object, y: object, names: list) -> float:
    """Forward seconds of the attention's linears; of those in ``names`` only, if any."""
    T = tokens_of(run)
    total = 0
    for linear in attention_gemms(s):
        if len(names) > 0 and linear[0] not in names:
            continue
        if linear[3] == 0:
            total += gemm(y, run.precision, T / run.tp, linear[1], linear[2])
        elif linear[0] == "out":
            total += gemm(y, run.precision, T, linear[1] / run.tp, linear[2])
        else:
            total += gemm(y, run.precision, T, linear[1], linear[2] / run.tp)
    return total


def first_linear_seconds(s: object, run: object, y: object) -> float:
    """Forward seconds of the first of the routed experts' grouped products."""
    local = s.experts / run.ep
    hidden = s.expert_hidden / run.etp
    return local * gemm(y, run.precision, routed_rows(s, run) / local, s.expert_dim, s.halves * hidden)


def expert_seconds(s: object, run: object, y: object) -> float:
    """Forward seconds of the routed experts' grouped products, and of LatentMoE's projections."""
    local = s.experts / run.ep
    hidden = s.expert_hidden / run.etp
    total = first_linear_seconds(s, run, y)
    total += local * gemm(y, run.precision, routed_rows(s, run) / local, hidden, s.expert_dim)
    if s.latent_dim > 0:
        total += 2 * gemm(y, run.precision, tokens_of(run) / run.tp, s.dim, s.latent_dim)
    return total


def feed_forward_seconds(s: object, run: object, y: object, hidden: float, halves: float) -> float:
    """Forward seconds of a dense feed-forward or shared expert."""
    T = tokens_of(run)
    total = gemm(y, run.precision, T, s.dim, halves * hidden / run.tp)
    return total + gemm(y, run.precision, T, hidden / run.tp, s.dim)


def elementwise_bytes(s: object, run: object, dense: bool) -> dict:
    """Bytes that one forward pass of a layer moves besides its products: norms, attention's glue, permutation, ..."""
    T = tokens_of(run)
    t = T / run.tp
    f = stored(run.precision)
    heads = T / run.tp * (s.heads * (s.d_qk + s.d_v) + (s.heads if s.latent else s.kv_heads) * (s.d_qk + s.d_v))
    norms = t * 2 * (2 * s.dim + s.dim) * BF16
    # Rotation, and for the latent the spreading of the shared key over the heads: read and written once.
    glue = heads * BF16
    lows = 0
    if run.precision != "bf16":
        # Each input of a product is read, and written in low precision along both dims.
        lows = t * s.dim * (BF16 + 2 * f) + T * s.heads * s.d_v / run.tp * (BF16 + 2 * f)
    act = 0
    permute = 0
    if dense:
        act = T * 3 * s.ffn / run.tp * BF16
        if run.precision != "bf16":
            lows += (t * s.dim + T * s.ffn / run.tp) * (BF16 + 2 * f)
    else:
        rows = routed_rows(s, run)
        hidden = s.expert_hidden / run.etp
        act = rows * (s.halves + 1) * hidden * BF16 + T * (s.halves + 1) * s.shared_hidden / run.tp * BF16
        permute = 4 * rows * s.expert_dim * BF16 + t * s.experts * 8
        if run.precision != "bf16":
            lows += rows * (s.expert_dim + hidden) * (BF16 + 2 * f)
        if run.moe_save == "preact_fp8":
            lows += rows * s.halves * hidden * (BF16 + 1 + FP32 / 128)
    return {"norms": norms, "glue": glue, "activation": act, "permutation": permute, "quantisation": lows}


def layer_seconds(s: object, run: object, y: object, dense: bool, window: float) -> dict:
    """Seconds of one layer and micro-batch: of its forward pass, of its gradients of inputs and of weights.

    Returns:
        ``{"forward": {component: seconds}, "input": …, "weight": …}``, what is hidden left out.
    """
    T = tokens_of(run)
    memory = y.memory_bandwidth * y.memory_efficiency
    moved = elementwise_bytes(s, run, dense)
    elementwise = 0
    for name in moved:
        elementwise += moved[name] / memory
    linears = linear_seconds(s, run, y, [])
    scores = attention_seconds(s, run, y, window, False)
    scores_back = attention_seconds(s, run, y, window, True)
    experts = 0
    shared = 0
    send = 0
    if dense:
        shared = feed_forward_seconds(s, run, y, s.ffn, 2)
    else:
        experts = expert_seconds(s, run, y)
        shared = feed_forward_seconds(s, run, y, s.shared_hidden, s.halves)
        send = exchange(s, run, y)
    slower = 1
    visible = 1
    if run.ep_overlap and not dense:
        slower = y.overlap_compute
        visible = 1 - y.overlap
    # Sequence parallelism: a gather and a scatter around the attention, and around what is shared of the second half.
    around = 2 * T * s.dim * BF16
    gathers = 1 + (1 if dense or s.shared_hidden > 0 else 0)
    tensor = gathers * ring(around, run.tp, link(y, run.tp), y.latency)
    context = 0
    if run.cp > 1:
        width = s.kv_lora + s.d_rope if s.latent else s.kv_heads * (s.d_qk + s.d_v) / run.tp
        gathered = ring(T * run.cp * width * BF16, run.cp, link(y, run.cp * run.tp), y.latency)
        # The next block of keys travels while this one is used.
        context = max(gathered - scores, 0.1 * gathered)
    launches = GRAPHED if run.cuda_graph else 1
    forward = {
        "attention linears": linears / slower,
        "attention": scores / slower,
        "experts": experts / slower,
        "shared and dense": shared / slower,
        "elementwise": elementwise / slower,
        "all-to-all": 2 * send * visible,
        "tensor parallel": tensor,
        "context parallel": context,
        "host": 0,
        "recompute": 0,
        "offload": 0,
    }
    back = {
        "attention linears": linears / slower,
        "attention": scores_back / slower,
        "experts": experts / slower,
        "shared and dense": shared / slower,
        "elementwise": 2 * elementwise / slower,
        "all-to-all": 2 * send * visible,
        "tensor parallel": 1.5 * tensor,
        "context parallel": 2 * context,
        "host": 0,
        "recompute": recompute_seconds(s, run, y, dense, forward, moved, memory) / slower,
        "offload": 0,
    }
    weight = {
        "attention linears": linears / slower,
        "experts": experts / slower,
        "shared and dense": shared / slower,
    }
    forward["host"] = y.host_seconds + max(0, FORWARD_KERNELS * y.launch_seconds * launches - total_of(forward))
    waiting = BACKWARD_KERNELS * y.launch_seconds * launches - total_of(back) - total_of(weight)
    back["host"] = y.host_seconds + max(0, waiting)
    return {"forward": forward, "input": back, "weight": weight}


def total_of(parts: dict) -> float:
    """Sum of the values."""
    total = 0
    for name in parts:
        total += parts[name]
    return total


def recompute_seconds(
    s: object, run: object, y: object, dense: bool, forward: dict, moved: dict, memory: float
) -> float:
    """Seconds that the backward pass of a layer spends on doing parts of the forward pass again."""
    # Parts that run again as a whole keep no more than they did at first.
    total = first_linear_seconds(s, run, y) if run.moe_save == "input" and not dense else 0
    if "full" in run.recompute:
        return total + total_of(forward)
    if "layernorm" in run.recompute:
        total += moved["norms"] / memory
    if "qk_norm" in run.recompute:
        total += moved["glue"] / memory
    if "mla_up_proj" in run.recompute and s.latent:
        total += linear_seconds(s, run, y, ["q_up", "kv_up", "q"]) + moved["glue"] / memory
    if "core_attn" in run.recompute:
        total += forward["attention"]
    if dense:
        return total + (forward["shared and dense"] if "mlp" in run.recompute else 0)
    if "moe" in run.recompute:
        again = forward["experts"] + forward["shared and dense"] + forward["all-to-all"]
        return total + again + (moved["permutation"] + moved["activation"]) / memory
    if "moe_act" in run.recompute:
        total += moved["activation"] / memory
    if "shared_experts" in run.recompute or "shared_expert" in run.recompute:
        total += forward["shared and dense"]
    return total


def head_seconds(s: object, run: object, y: object) -> float:
    """Forward seconds of one head and its loss, in bf16; its backward pass takes twice as long."""
    T = tokens_of(run)
    logits = T * s.vocab / run.tp
    return gemm(y, "bf16", T, s.dim, s.vocab / run.tp) + 3 * logits * BF16 / (y.memory_bandwidth * y.memory_efficiency)


def joint_seconds(s: object, run: object, y: object) -> float:
    """Forward seconds of one MTP depth beside its layer and its head."""
    return gemm(y, run.precision, tokens_of(run) / run.tp, 2 * s.dim, s.dim)
