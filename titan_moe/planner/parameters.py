"""Every parameter of this project's own modules by name: what each weighs depends on how its optimizer stores it.

A name has ``*`` for the number of its layer. Tested equal to the modules on meta. Written in the part of Python that
``to_js`` translates.
"""


def entry(name: str, elements: float, last: float, cut: str) -> list:
    """``[name, elements, last dim, cut]``; last is 0 for a vector, cut ``tp``, ``ep`` or nothing."""
    return [name, elements, last, cut]


def linear_entries(name: str, rows: float, columns: float, cut: str, bias: bool, bias_cut: str) -> list:
    """A linear layer's weight, and its bias where it has one."""
    entries = [entry(name + ".weight", rows * columns, columns, cut)]
    if bias:
        entries.append(entry(name + ".bias", rows, 0, bias_cut))
    return entries


def attention_entries(s: object) -> list:
    """Of one attention."""
    at = "self_attn."
    entries = []
    if s.latent:
        if s.q_lora > 0:
            entries.extend(linear_entries(at + "q_a_proj", s.q_lora, s.dim, "", False, ""))
            entries.append(entry(at + "q_a_layernorm.weight", s.q_lora, 0, ""))
            entries.extend(linear_entries(at + "q_b_proj", s.heads * s.d_qk, s.q_lora, "tp", False, ""))
        else:
            entries.extend(linear_entries(at + "q_proj", s.heads * s.d_qk, s.dim, "tp", False, ""))
        entries.extend(linear_entries(at + "kv_a_proj_with_mqa", s.kv_lora + s.d_rope, s.dim, "", False, ""))
        entries.append(entry(at + "kv_a_layernorm.weight", s.kv_lora, 0, ""))
        up = s.heads * (s.d_qk - s.d_rope + s.d_v)
        entries.extend(linear_entries(at + "kv_b_proj", up, s.kv_lora, "tp", False, ""))
        entries.extend(linear_entries(at + "o_proj", s.dim, s.heads * s.d_v, "tp", False, ""))
        return entries
    if s.sinks:
        entries.append(entry(at + "sinks", s.heads, 0, "tp"))
    entries.extend(linear_entries(at + "q_proj", s.heads * s.d_qk, s.dim, "tp", s.qkv_bias, "tp"))
    entries.extend(linear_entries(at + "k_proj", s.kv_heads * s.d_qk, s.dim, "tp", s.qkv_bias, "tp"))
    entries.extend(linear_entries(at + "v_proj", s.kv_heads * s.d_v, s.dim, "tp", s.qkv_bias, "tp"))
    entries.extend(linear_entries(at + "o_proj", s.dim, s.heads * s.d_v, "tp", s.out_bias, ""))
    if s.qk_norm:
        cut = "tp" if s.norm_over_heads else ""
        entries.append(entry(at + "q_norm.weight", s.d_qk * (s.heads if s.norm_over_heads else 1), 0, cut))
        entries.append(entry(at + "k_norm.weight", s.d_qk * (s.kv_heads if s.norm_over_heads else 1), 0, cut))
    return entries


def feed_forward_entries(at: str, dim: float, hidden: float, gated: bool) -> list:
    """Of a dense feed-forward or a shared expert."""
    entries = []
    if gated:
        entries.extend(linear_entries(at + "gate_proj", hidden, dim, "tp", False, ""))
    entries.extend(linear_entries(at + "up_proj", hidden, dim, "tp", False, ""))
    entries.extend(linear_entries(at + "down_proj", dim, hidden, "tp", False, ""))
    return entries


def moe_entries(s: object) -> list:
    """Of one MoE layer's feed-forward."""
    at = "mlp."
    entries = linear_entries(at + "router", s.experts, s.dim, "", s.router_bias, "")
    # The bias of an expert is a matrix in shape.
    w1 = s.experts * s.halves * s.expert_hidden
    entries.append(entry(at + "experts.w1", w1 * s.expert_dim, s.expert_dim, "ep"))
    entries.append(entry(at + "experts.w2", s.experts * s.expert_dim * s.expert_hidden, s.expert_hidden, "ep"))
    if s.expert_bias:
        entries.append(entry(at + "experts.b1", w1, s.expert_hidden, "ep"))
        entries.append(entry(at + "experts.b2", s.experts * s.expert_dim, s.expert_dim, "ep"))
    if s.shared_hidden > 0:
        entries.extend(feed_forward_entries(at + "shared.", s.dim, s.shared_hidden, s.halves == 2))
        if s.shared_gate:
            entries.extend(linear_entries(at + "shared.gate", 1, s.dim, "", False, ""))
    if s.latent_dim > 0:
        entries.extend(linear_entries(at + "latent_down", s.latent_dim, s.dim, "", False, ""))
        entries.extend(linear_entries(at + "latent_up", s.dim, s.latent_dim, "", False, ""))
    return entries


def layer_entries(s: object, dense: bool) -> list:
    """Of one decoder layer."""
    entries = [entry("input_layernorm.weight", s.dim, 0, ""), entry("post_attention_layernorm.weight", s.dim, 0, "")]
    entries.extend(attention_entries(s))
    entries.extend(feed_forward_entries("mlp.", s.dim, s.ffn, True) if dense else moe_entries(s))
    return entries


def mtp_entries(s: object) -> list:
    """Of one MTP depth beside its decoder layer."""
    entries = [entry("enorm.weight", s.dim, 0, ""), entry("hnorm.weight", s.dim, 0, "")]
    entries.extend(linear_entries("eh_proj", s.dim, 2 * s.dim, "", False, ""))
    entries.append(entry("norm.weight", s.dim, 0, ""))
    if s.mtp_own:
        entries.append(entry("embed_tokens.weight", s.vocab * s.dim, s.dim, "tp"))
        entries.append(entry("lm_head.weight", s.vocab * s.dim, s.dim, "tp"))
    return entries


def stage_entries(s: object, stage: object, mtp_dense: bool) -> list:
    """``[prefix, times, entries]`` of what a pipeline stage holds, its copies of the embedding and head included."""
    dense = 0
    for layer in stage.layers:
        dense += 1 if layer < s.num_dense else 0
    parts = []
    if dense > 0:
        parts.append(["layers.*.", dense, layer_entries(s, True)])
    if len(stage.layers) > dense:
        parts.append(["layers.*.", len(stage.layers) - dense, layer_entries(s, False)])
    depths = len(stage.mtp)
    if depths > 0:
        parts.append(["mtp.*.layer.", depths, layer_entries(s, mtp_dense)])
        parts.append(["mtp.*.", depths, mtp_entries(s)])
    table = s.vocab * s.dim
    rest = []
    if stage.embedding or (depths > 0 and not s.mtp_own):
        rest.append(entry("embed_tokens.weight", table, s.dim, "tp"))
    if (stage.head and s.mtp == 0) or 0 in stage.mtp:
        rest.append(entry("norm.weight", s.dim, 0, ""))
    if stage.head and (not s.tied or not stage.embedding):
        rest.append(entry("embed_tokens.weight" if s.tied else "lm_head.weight", table, s.dim, "tp"))
    if len(rest) > 0:
        parts.append(["", 1, rest])
    return parts
