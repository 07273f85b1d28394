"""What this project's own modules keep for the backward pass, as they are; tested against the measured bytes.

See ``titan_moe/kernels`` for what each operator saves. On a CPU attention runs in pieces, whose outputs stay beside
their concatenation, and values are padded to the width of the keys (``titan_moe.models.attention``). Written in the
part of Python that ``to_js`` translates.
"""

FP32 = 4
INT64 = 8


def own_row(name: str, tokens: float, width: float, size: float, why: str) -> dict:
    """One saved tensor; whole layers are recomputed or none, so there are no targets."""
    return {
        "name": name,
        "tokens": tokens,
        "width": width,
        "size": size,
        "bytes": tokens * width * size,
        "why": why,
        "recompute": "",
        "offload": "",
    }


def own_layer_rows(s: object, run: object, dense: bool) -> list:
    """Saved tensors of one decoder layer."""
    T = run.mbs * run.seq / run.cp
    t = T / run.tp
    w = run.compute_bytes
    wide = max(w, FP32)
    cpu = run.device == "cpu"
    H = s.heads / run.tp
    G = s.heads / run.tp if s.latent else s.kv_heads / run.tp
    rows = [
        own_row("input", t, s.dim, w, "backward of the norm"),
        own_row("norm", t, s.dim, w, "weight gradient of the projections"),
        own_row("norm scales", t, 2, wide, "backward of the norms"),
        own_row("residual", t, s.dim, w, "backward of the second norm"),
    ]
    if s.latent:
        if s.q_lora > 0:
            rows.append(own_row("q_a", t, s.q_lora, w, "backward of the latent's norm"))
            rows.append(own_row("q_a norm", t, s.q_lora, w, "weight gradient of q_b"))
            rows.append(own_row("q_a scale", t, 1, wide, "backward of the latent's norm"))
        rows.append(own_row("kv_a", t, s.kv_lora + s.d_rope, w, "backward of the latent's norm"))
        rows.append(own_row("kv_a norm", t, s.kv_lora, w, "weight gradient of kv_b"))
        rows.append(own_row("kv_a scale", t, 1, wide, "backward of the latent's norm"))
    if s.qk_norm:
        rows.append(own_row("q before norm", T, H * s.d_qk, w, "backward of the head norm"))
        rows.append(own_row("k before norm", T, G * s.d_qk, w, "backward of the head norm"))
        scales = 2 if s.norm_over_heads else H + G
        rows.append(own_row("head norm scales", T, scales, wide, "backward of the head norms"))
    width = s.d_qk + (8 if s.sinks else 0)
    value = s.d_v
    if cpu and width > s.d_v:
        value = width
    elif s.latent:
        # Values are a view of what kv_b made, which therefore stays whole.
        value = s.d_qk - s.d_rope + s.d_v
    rows.append(own_row("q", T, H * width, w, "backward of attention"))
    rows.append(own_row("k", T, G * width, w, "backward of attention"))
    rows.append(own_row("v", T, G * value, w, "backward of attention"))
    rows.append(own_row("lse", T, H, FP32, "softmax of attention"))
    rows.append(own_row("attention out", T, H * s.d_v, w, "weight gradient of the output projection"))
    if cpu:
        rows.append(own_row("attention pieces", T, H * max(width, s.d_v), w, "backward of attention"))
    rows.append(own_row("mlp norm", t, s.dim, w, "weight gradient of the feed-forward"))
    if dense:
        rows.append(own_row("gate, up, silu, product", T, 4 * s.ffn / run.tp, w, "backward of the feed-forward"))
        return rows
    R = t * s.top_k * run.etp * run.imbalance
    travel = run.ep * run.etp > 1
    if w < FP32:
        rows.append(own_row("router input", t, s.dim, FP32, "weight gradient of the router"))
    rows.append(own_row("scores", t, 2 * s.experts, wide, "backward of the router"))
    rows.append(own_row("expert ids, weights", t, 2 * s.top_k, INT64, "backward of the router"))
    rows.append(own_row("row map", R, 2, INT64, "backward of the permutation"))
    rows.append(own_row("routing weights", R, 1, wide, "backward of the experts"))
    if travel:
        rows.append(own_row("received rows", R, s.expert_dim, w, "weight gradient of w1"))
        rows.append(own_row("received map", R, 2, INT64, "backward of the dispatch"))
    rows.append(own_row("z", R, s.halves * s.expert_hidden / run.etp, w, "backward of the experts"))
    if s.latent_dim > 0:
        rows.append(own_row("latent in and out", t, 2 * s.latent_dim, w, "weight gradients of the projections"))
    if s.shared_hidden > 0:
        rows.append(own_row("shared z", T, s.halves * s.shared_hidden / run.tp, w, "backward of the activation"))
        rows.append(own_row("shared act", T, s.shared_hidden / run.tp, w, "weight gradient of the shared expert"))
        if s.shared_gate:
            rows.append(own_row("shared act before its gate", T, s.shared_hidden / run.tp, w, "gradient of the gate"))
    return rows


def own_head_rows(s: object, run: object) -> list:
    """Saved tensors of the final norm, the head and the loss, for one set of logits."""
    T = run.mbs * run.seq / run.cp
    t = T / run.tp
    w = run.compute_bytes
    return [
        own_row("final input", t, s.dim, w, "backward of the final norm"),
        own_row("final norm", t, s.dim, w, "weight gradient of the head"),
        own_row("logits", T, s.vocab / run.tp, w, "backward of the loss"),
        own_row("labels, tokens", T, 2, INT64, "backward of the loss and the embedding"),
    ]


def own_model_rows(s: object, run: object) -> list:
    """What all layers of a stage share: masks and rotary tables."""
    w = run.compute_bytes
    rows = [own_row("rotary tables", run.seq, s.d_qk + s.d_rope / 2, max(w, FP32), "backward of the rotation")]
    kinds = []
    for window in s.windows:
        if window not in kinds:
            kinds.append(window)
    masked = run.document_mask or (run.device == "cpu" and run.seq >= 128)
    for window in kinds:
        if masked or s.sinks or (window > 0 and window < run.seq):
            sequences = run.mbs if run.document_mask else 1
            rows.append(own_row("mask", sequences * run.seq, run.seq + (1 if s.sinks else 0), w, "attention"))
    return rows


def own_mtp_rows(s: object, run: object) -> list:
    """Saved tensors of one MTP depth beside its decoder layer and its head."""
    T = run.mbs * run.seq / run.cp
    t = T / run.tp
    w = run.compute_bytes
    return [
        own_row("mtp embedding", t, s.dim, w, "backward of its norm"),
        own_row("mtp joined", t, 2 * s.dim, w, "weight gradient of the projection"),
        own_row("mtp norm scales", t, 3, max(w, FP32), "backward of its norms"),
    ]
