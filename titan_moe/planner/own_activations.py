"""What this project's own modules keep for the backward pass, as they are; tested against the measured bytes.

See ``titan_moe/kernels`` for what each operator saves, and docs/memory.md for the targets of recompute and offload. On
a CPU attention runs in pieces, whose outputs stay beside their concatenation, and values are padded to the width of
the keys (``titan_moe.models.attention``). Under tensor parallelism with sequence parallel, linears whose outputs are
shared out keep their gathered input. Written in the part of Python that ``to_js`` translates.
"""

from titan_moe.planner.rows import held_rows, tokens_of

FP32 = 4
INT64 = 8
FIRST_LINEAR = "first linear"
"""In the place of a recompute target: what ``moe.save = "input"`` makes again."""


def named(targets: list, asked: list) -> str:
    """The one of ``targets`` that is asked for; if none is, the first."""
    for target in targets:
        if target in asked:
            return target
    return targets[0] if len(targets) > 0 else ""


def own_row(
    run: object, name: str, tokens: float, width: float, size: float, why: str, recompute: list, offload: list
) -> dict:
    """One saved tensor ``[tokens, width]``, and the targets any of which removes it."""
    return {
        "name": name,
        "tokens": tokens,
        "width": width,
        "size": size,
        "bytes": tokens * width * size,
        "why": why,
        "recompute": named(recompute, run.recompute),
        "offload": named(offload, run.offload),
    }


def stream_tokens(run: object) -> float:
    """Tokens of the residual stream on one rank."""
    return tokens_of(run) / run.tp if run.sequence_parallel else tokens_of(run)


def gathers(run: object) -> bool:
    """Whether linears keep a gathered copy of the stream instead of the stream."""
    return run.tp > 1 and run.sequence_parallel


def own_latent_rows(s: object, run: object) -> list:
    """Saved tensors of multi-head latent attention, but for what the softmax saves."""
    T = tokens_of(run)
    w = run.compute_bytes
    wide = max(w, FP32)
    H = s.heads / run.tp
    rows = []
    if s.q_lora > 0:
        rows.append(own_row(run, "q_a", T, s.q_lora, w, "backward of the latent's norm", [], ["attn"]))
        rows.append(own_row(run, "q_a norm", T, s.q_lora, w, "weight gradient of q_b", ["qk_norm"], ["attn"]))
        rows.append(own_row(run, "q_a scale", T, 1, wide, "backward of the latent's norm", ["qk_norm"], ["attn"]))
    elif "mla_up_proj" in run.recompute:
        rows.append(own_row(run, "q before rotation", T, H * s.d_qk, w, "queries are made again from it", [], ["attn"]))
    rows.append(own_row(run, "kv_a", T, s.kv_lora + s.d_rope, w, "backward of the latent's norm", [], ["attn"]))
    rows.append(own_row(run, "kv_a scale", T, 1, wide, "backward of the latent's norm", ["qk_norm"], ["attn"]))
    if run.cp > 1 and run.cp_method == "allgather":
        both = s.kv_lora + s.d_rope
        rows.append(own_row(run, "latent of all ranks", T * run.cp, both, w, "weight gradient of kv_b", [], ["attn"]))
    else:
        rows.append(own_row(run, "kv_a norm", T, s.kv_lora, w, "weight gradient of kv_b", ["qk_norm"], ["attn"]))
        if "mla_up_proj" in run.recompute and run.cp == 1:
            rows.append(own_row(run, "rotated key part", T, s.d_rope, w, "keys are made again from it", [], ["attn"]))
    return rows


def own_head_norm_rows(s: object, run: object) -> list:
    """Saved tensors of the norms of queries and keys, which come before their rotation."""
    T = tokens_of(run)
    w = run.compute_bytes
    wide = max(w, FP32)
    H = s.heads / run.tp
    G = s.kv_heads / run.tp
    why = "backward of the head norm"
    if s.norm_over_heads and run.tp > 1:
        # Each rank norms its part, with the sum of squares of all.
        rows = [own_row(run, "q, k normed", T, (H + G) * s.d_qk, wide, why, ["qk_norm"], ["attn"])]
        copied = "q, k in fp32" if w < FP32 else "q, k before norm"
        tags = ["qk_norm"] if w < FP32 else []
        rows.append(own_row(run, copied, T, (H + G) * s.d_qk, wide, why, tags, ["attn"]))
        if w < FP32 and "qk_norm" in run.recompute:
            rows.append(own_row(run, "q, k before norm", T, (H + G) * s.d_qk, w, why, [], ["attn"]))
    else:
        rows = [
            own_row(run, "q before norm", T, H * s.d_qk, w, why, [], ["attn"]),
            own_row(run, "k before norm", T, G * s.d_qk, w, why, [], ["attn"]),
        ]
    scales = 2 if s.norm_over_heads else H + G
    rows.append(own_row(run, "head norm scales", T, scales, wide, "backward of the head norms", ["qk_norm"], ["attn"]))
    return rows


def own_softmax_rows(s: object, run: object) -> list:
    """Saved tensors of attention's products: queries, keys, values, and what came out."""
    T = tokens_of(run)
    w = run.compute_bytes
    H = s.heads / run.tp
    G = H if s.latent else s.kv_heads / run.tp
    away = ["core_attn", "attn"]
    again = "core_attn" in run.recompute
    # What makes queries and keys, if it can run again.
    makers = ["mla_up_proj"] if s.latent else []
    if s.qk_norm:
        makers = ["qk_norm"]
    # What was exchanged is not made again, nor is what comes back.
    exchanged = run.cp > 1 and run.cp_method == "alltoall"
    if exchanged:
        makers = []
    cpu = run.device == "cpu"
    width = s.d_qk + (8 if s.sinks else 0)
    gathered = run.cp > 1 and run.cp_method == "allgather"
    # Where attention pads what it is given, that is gone with attention's own tensors, and what it was given stays.
    padded = s.sinks
    keys = T * run.cp if gathered else T
    rows = [own_row(run, "q", T, H * width, w, "backward of attention", ["core_attn"] if padded else makers, away)]
    if padded and again:
        rows.append(own_row(run, "q without sinks", T, H * s.d_qk, w, "attention runs again", makers, away))
    made_keys = ["core_attn"] if padded else [] if gathered and not s.latent else makers
    rows.append(own_row(run, "k", keys, G * width, w, "backward of attention", made_keys, away))
    if padded and again:
        rows.append(own_row(run, "k without sinks", keys, G * s.d_qk, w, "attention runs again", makers, away))
    # Values of a latent are a view of what kv_b made, which therefore stays whole.
    value = s.d_qk - s.d_rope + s.d_v if s.latent else s.d_v
    made_values = ["mla_up_proj"] if s.latent and not exchanged else []
    if cpu and width > s.d_v:
        # Cut out by the padding, values alone are held; gathered ones as they came.
        rows.append(own_row(run, "v, padded", keys, G * width, w, "backward of attention", ["core_attn"], away))
        if again:
            rows.append(own_row(run, "v", keys, G * value, w, "attention runs again", made_values, away))
    else:
        rows.append(own_row(run, "v", keys, G * value, w, "backward of attention", made_values, away))
    rows.append(own_row(run, "lse", T, H, FP32, "softmax of attention", ["core_attn"], away))
    out = ["attn_proj", "attn"] if cpu else ["core_attn", "attn_proj", "attn"]
    made_out = [] if exchanged else ["core_attn"]
    why = "weight gradient of the output projection"
    rows.append(own_row(run, "attention out", T, H * s.d_v, w, why, made_out, out))
    # One piece is what the output projection takes, unless padding has to be cut off.
    whole = run.seq < 128 and (run.cp == 1 or run.cp_method == "alltoall") and width <= s.d_v
    if cpu and not whole:
        pieces = H * max(width, s.d_v)
        rows.append(own_row(run, "attention pieces", T, pieces, w, "backward of attention", ["core_attn"], away))
    return rows


def own_attention_rows(s: object, run: object) -> list:
    """Saved tensors of the first norm and the attention of a layer."""
    t = stream_tokens(run)
    w = run.compute_bytes
    rows = [
        own_row(run, "input", t, s.dim, w, "backward of the norm", [], ["attn_norm"]),
        own_row(run, "norm scale", t, 1, max(w, FP32), "backward of the norm", ["layernorm"], ["attn_norm"]),
    ]
    projections = ["qkv", "attn"]
    if s.latent or not gathers(run):
        rows.append(own_row(run, "norm", t, s.dim, w, "weight gradient of the projections", ["layernorm"], projections))
    if gathers(run) and (not s.latent or s.q_lora == 0):
        whole = tokens_of(run)
        rows.append(own_row(run, "norm, gathered", whole, s.dim, w, "weight gradient of q, k, v", [], projections))
    if s.latent:
        rows.extend(own_latent_rows(s, run))
    elif s.qk_norm:
        rows.extend(own_head_norm_rows(s, run))
    rows.extend(own_softmax_rows(s, run))
    rows.append(own_row(run, "residual", t, s.dim, w, "backward of the second norm", [], ["mlp_norm"]))
    rows.append(own_row(run, "mlp norm scale", t, 1, max(w, FP32), "backward of the norm", ["layernorm"], ["mlp_norm"]))
    return rows


def own_dense_rows(s: object, run: object) -> list:
    """Saved tensors of the dense feed-forward of a layer."""
    T = tokens_of(run)
    w = run.compute_bytes
    why = "weight gradient of the feed-forward"
    rows = []
    if gathers(run):
        rows.append(own_row(run, "mlp norm, gathered", T, s.dim, w, why, [], ["mlp"]))
    if not gathers(run) or "mlp" in run.recompute:
        rows.append(own_row(run, "mlp norm", stream_tokens(run), s.dim, w, why, ["layernorm"], ["mlp"]))
    hidden = 2 * s.ffn / run.tp
    rows.append(own_row(run, "gate, up", T, hidden, w, "backward of the activation", ["mlp"], ["moe_act", "mlp"]))
    again = ["moe_act", "mlp"]
    rows.append(own_row(run, "silu", T, hidden / 2, w, "backward of the product", again, ["moe_act", "mlp"]))
    rows.append(own_row(run, "product", T, hidden / 2, w, "weight gradient of the last linear", again, ["mlp"]))
    return rows


def own_routed_rows(s: object, run: object) -> list:
    """Saved tensors of the router, the exchange and the experts."""
    t = tokens_of(run) / run.tp
    w = run.compute_bytes
    wide = max(w, FP32)
    sent = t * s.top_k
    travel = run.ep * run.etp > 1
    R = held_rows(s, run)
    bounded = run.recv_capacity_factor > 0
    rows = []
    # Rows that travelled are kept instead, and so is the router's copy in fp32.
    shared = s.shared_hidden > 0 and (run.tp == 1 or s.shared_gate)
    if not travel or w == wide or shared or s.latent_dim > 0 or "moe" in run.recompute:
        why = "weight gradients of router and experts"
        # Without sequence parallel it is cut out of what the norm made.
        again = ["moe"] if run.tp > 1 and not run.sequence_parallel else ["layernorm"]
        rows.append(own_row(run, "mlp norm", t, s.dim, w, why, again, ["expert_fc1", "moe"]))
    if w < FP32:
        rows.append(own_row(run, "router input", t, s.dim, FP32, "weight gradient of the router", ["moe"], ["moe"]))
    rows.append(own_row(run, "logits, scores", t, s.experts + s.top_k + 1, wide, "router", ["moe"], ["moe"]))
    rows.append(own_row(run, "expert ids", t, s.top_k, INT64, "backward of the router", ["moe"], ["moe"]))
    mapped = sent * run.etp
    # With a bound, what is sent has as much room as what is received.
    mapped += R if bounded else mapped
    rows.append(own_row(run, "row map", mapped, 1, INT64, "backward of the permutation", ["moe"], ["moe"]))
    rows.append(own_row(run, "routing weights", R, 1, wide, "backward of the experts", ["moe"], ["moe"]))
    if travel:
        why = "weight gradient of w1"
        rows.append(own_row(run, "received rows", R, s.expert_dim, w, why, ["moe"], ["expert_fc1", "moe"]))
        rows.append(own_row(run, "received map", R, 2, INT64, "backward of the dispatch", ["moe"], ["moe"]))
    hidden = s.halves * s.expert_hidden / run.etp
    why = "backward of the experts"
    if run.moe_save == "preact_fp8":
        rows.append(own_row(run, "z in FP8", R, hidden, 1, why, ["moe"], ["moe_act", "moe"]))
        rows.append(own_row(run, "scales of z", R, -(-hidden // 128), FP32, why, ["moe"], ["moe_act", "moe"]))
    else:
        again = FIRST_LINEAR if run.moe_save == "input" else "moe"
        rows.append(own_row(run, "z", R, hidden, w, why, [again], ["moe_act", "moe"]))
    if s.latent_dim > 0:
        why = "weight gradients of the projections"
        rows.append(own_row(run, "latent in and out", t, 2 * s.latent_dim, w, why, ["moe"], ["moe"]))
    return rows


def own_shared_rows(s: object, run: object) -> list:
    """Saved tensors of the shared expert."""
    T = tokens_of(run)
    w = run.compute_bytes
    width = s.shared_hidden / run.tp
    again = ["shared_expert", "moe"]
    away = ["shared_expert", "moe"]
    rows = []
    if run.tp > 1:
        # The experts take this rank's tokens, the shared one all of them.
        why = "weight gradient of the shared expert"
        made = ["moe"] if run.sequence_parallel else ["layernorm"]
        rows.append(own_row(run, "mlp norm, all tokens", T, s.dim, w, why, made, away))
    up = s.halves * width
    activated = ["moe_act", "shared_expert", "moe"]
    rows.append(own_row(run, "shared z", T, up, w, "backward of the activation", again, activated))
    why = "weight gradient of the shared expert"
    rows.append(own_row(run, "shared act", T, width, w, why, activated, away))
    if s.shared_gate:
        rows.append(own_row(run, "shared act, gated", T, width, w, "gradient of the gate", again, away))
    return rows


def own_layer_rows(s: object, run: object, dense: bool) -> list:
    """Saved tensors of one decoder layer."""
    rows = own_attention_rows(s, run)
    if dense:
        rows.extend(own_dense_rows(s, run))
        return rows
    rows.extend(own_routed_rows(s, run))
    if s.shared_hidden > 0:
        rows.extend(own_shared_rows(s, run))
    return rows


def own_head_rows(s: object, run: object) -> list:
    """Saved tensors of the final norm, the head and the loss, for one set of logits."""
    T = tokens_of(run)
    t = stream_tokens(run)
    w = run.compute_bytes
    wide = max(w, FP32)
    rows = [
        own_row(run, "final input", t, s.dim, w, "backward of the final norm", [], []),
        own_row(run, "final norm scale", t, 1, wide, "backward of the final norm", [], []),
        own_row(run, "final norm", T if gathers(run) else t, s.dim, w, "weight gradient of the head", [], []),
        own_row(run, "logits", T, s.vocab / run.tp, w, "backward of the loss", [], []),
    ]
    if run.tp > 1:
        rows.append(own_row(run, "own tokens, labels", T, 2, INT64, "backward of the loss and the embedding", [], []))
        rows.append(own_row(run, "log of sums", T, 1, wide, "backward of the loss", [], []))
    return rows


def own_model_rows(s: object, run: object) -> list:
    """What all layers of a stage share: masks and rotary tables."""
    w = run.compute_bytes
    places = run.seq / run.cp
    rows = [own_row(run, "rotary tables", places, s.d_qk + s.d_rope / 2, max(w, FP32), "rotation", [], [])]
    kinds = []
    for window in s.windows:
        if window not in kinds:
            kinds.append(window)
    masked = run.document_mask or (run.device == "cpu" and run.seq >= 128)
    queries = run.seq if run.cp_method == "alltoall" else places
    for window in kinds:
        if masked or s.sinks or (window > 0 and window < run.seq):
            sequences = run.mbs if run.document_mask else 1
            keys = run.seq + (1 if s.sinks else 0)
            rows.append(own_row(run, "mask", sequences * queries, keys, w, "attention", [], []))
    return rows


def own_output_rows(s: object, run: object) -> list:
    """What a stage that is not the last holds of a pass besides: its output, until its gradient has come."""
    return [own_row(run, "stage output", stream_tokens(run), s.dim, run.compute_bytes, "start of the backward", [], [])]


def own_mtp_rows(s: object, run: object) -> list:
    """Saved tensors of one MTP depth beside its decoder layer and its head."""
    t = stream_tokens(run)
    w = run.compute_bytes
    rows = [own_row(run, "mtp embedding", t, s.dim, w, "backward of its norm", [], [])]
    # Whole layers that run again are whole depths.
    if "full" not in run.recompute:
        rows.append(own_row(run, "mtp joined", t, 2 * s.dim, w, "weight gradient of the projection", [], []))
        rows.append(own_row(run, "mtp norm scales", t, 3, max(w, FP32), "backward of its norms", [], []))
    return rows
