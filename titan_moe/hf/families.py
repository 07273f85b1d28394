"""What each family's ``config.json`` says, read into our fields and written from them.

A ``read`` function gives fields of the family's config and of MoEConfig in one dict. It refuses what the family
cannot express.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_moe.errors import ConfigError
from titan_moe.models import ModelConfig

_MISSING = object()

# What every model of a family has, though no key of config.json says so.
_SIGMOID = {"score_function": "sigmoid", "expert_bias": True}
_CLAMPED = {"router_bias": True, "expert_linear_bias": True, "activation": "clamped_swiglu"}


class Reader:
    """A config.json whose keys are asked for by name, with errors that name them."""

    def __init__(self, hf: dict[str, Any]):
        self.hf = hf

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """The first of ``names`` that is there and not null, else the default."""
        for name in names:
            if self.hf.get(name) is not None:
                return self.hf[name]
        if default is _MISSING:
            raise ConfigError(f"config.json: {names[0]} is missing.")
        return default

    def require(self, name: str, *legal: Any) -> None:
        """Refuses a value that the family would silently read as another; absent or null is fine."""
        value = self.hf.get(name)
        if value is not None and value not in legal:
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; only {', '.join(map(repr, legal))}.")

    def rope(self, default_theta: float) -> tuple[float, dict[str, Any] | None, float | None]:
        """Theta, scaling (None: plain RoPE) and the share of dims that rotate (None: not given)."""
        rope = self.get("rope_scaling", "rope_parameters", default={})
        rope = {key: value for key, value in rope.items() if value is not None}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ConfigError("config.json: rope_parameters per layer type are not supported.")
        theta = rope.pop("rope_theta", self.get("rope_theta", default=default_theta))
        share = rope.pop("partial_rotary_factor", self.hf.get("partial_rotary_factor"))
        old_type = rope.pop("type", "default")
        kind = rope.pop("rope_type", old_type)
        if kind == "default":
            return theta, None, share
        rope.setdefault("original_max_position_embeddings", self.get("max_position_embeddings"))
        return theta, {"rope_type": kind, **rope}, share


def _common(hf: Reader) -> dict[str, Any]:
    hf.require("hidden_act", "silu")
    heads = hf.get("num_attention_heads")
    return {
        "vocab_size": hf.get("vocab_size"),
        "dim": hf.get("hidden_size"),
        "num_layers": hf.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads", default=heads),
        "head_dim": hf.get("head_dim", default=hf.get("hidden_size") // heads),
        "max_seq_len": hf.get("max_position_embeddings"),
        "init_std": hf.get("initializer_range", default=0.02),
        "tie_embeddings": hf.get("tie_word_embeddings", default=False),
        "top_k": hf.get("num_experts_per_tok"),
    }


def _read_mixtral(hf: Reader) -> dict[str, Any]:
    theta, scaling, _ = hf.rope(1e6)
    return _common(hf) | {
        "sliding_window": hf.get("sliding_window", default=None),
        "norm_eps": hf.get("rms_norm_eps", default=1e-5),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_dim": hf.get("intermediate_size"),
        "num_experts": hf.get("num_local_experts", "num_experts"),
    }


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe.hidden_dim,
        "num_local_experts": config.moe.num_experts,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
    }


def _read_qwen_moe(hf: Reader) -> dict[str, Any]:
    """What Qwen2-MoE and Qwen3-MoE share."""
    hf.require("use_sliding_window", False)
    hf.require("decoder_sparse_step", 1)
    dense = sorted(hf.get("mlp_only_layers", default=[]))
    if dense != list(range(len(dense))):
        raise ConfigError(f"config.json: mlp_only_layers = {dense}: only leading layers can be dense.")
    theta, scaling, _ = hf.rope(1e4)
    return _common(hf) | {
        "ffn_dim": hf.get("intermediate_size"),
        "num_dense_layers": len(dense),
        "norm_eps": hf.get("rms_norm_eps", default=1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_dim": hf.get("moe_intermediate_size"),
        "num_experts": hf.get("num_experts", "num_local_experts"),
        "normalize_weights": hf.get("norm_topk_prob", default=False),
    }


def _write_qwen_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.ffn_dim or config.moe.hidden_dim,
        "moe_intermediate_size": config.moe.hidden_dim,
        "num_experts": config.moe.num_experts,
        "norm_topk_prob": config.moe.normalize_weights,
        "mlp_only_layers": list(range(config.num_dense_layers)),
        "decoder_sparse_step": 1,
        "head_dim": config.head_dim,
        "use_sliding_window": False,
    }


def _read_qwen3_moe(hf: Reader) -> dict[str, Any]:
    hf.require("attention_bias", False)
    return _read_qwen_moe(hf)


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen_moe(config) | {"attention_bias": False}


def _read_qwen2_moe(hf: Reader) -> dict[str, Any]:
    return _read_qwen_moe(hf) | {
        "qkv_bias": hf.get("qkv_bias", default=True),
        "shared_hidden_dim": hf.get("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    own = {"qkv_bias": config.qkv_bias, "shared_expert_intermediate_size": config.moe.shared_hidden_dim}
    # The layers' kinds follow from use_sliding_window; a list would go stale with the number of layers.
    return _write_qwen_moe(config) | own | {"layer_types": ["full_attention"] * config.num_layers}


def _read_minimax_m2(hf: Reader) -> dict[str, Any]:
    hf.require("scoring_func", "sigmoid")
    hf.require("use_routing_bias", True)
    hf.require("use_qk_norm", True)
    hf.require("qk_norm_type", "per_layer")
    hf.require("shared_intermediate_size", 0)
    hf.require("router_jitter_noise", 0)
    if any(kind != 1 for kind in hf.get("attn_type_list", default=[])):
        raise ConfigError("config.json: attn_type_list: only 1, full attention, is supported.")
    theta, scaling, share = hf.rope(5e6)
    common = _common(hf)
    return common | {
        "rotary_dims": hf.get("rotary_dim", default=int(common["head_dim"] * (1 if share is None else share))),
        "norm_eps": hf.get("rms_norm_eps", default=1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_dim": hf.get("intermediate_size"),
        "num_experts": hf.get("num_local_experts", "num_experts"),
        **_SIGMOID,
    }


def _write_minimax_m2(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe.hidden_dim,
        "num_local_experts": config.moe.num_experts,
        "head_dim": config.head_dim,
        "rotary_dim": config.rotary_dims,
        "partial_rotary_factor": config.rotary_dims / config.head_dim,
    }


def _read_deepseek_moe(hf: Reader) -> dict[str, Any]:
    """What the DeepSeek models and GLM-4.5 share."""
    hf.require("moe_layer_freq", 1)
    return {
        "ffn_dim": hf.get("intermediate_size"),
        "num_dense_layers": hf.get("first_k_dense_replace", default=0),
        "hidden_dim": hf.get("moe_intermediate_size"),
        "num_experts": hf.get("n_routed_experts", "num_local_experts"),
        "shared_hidden_dim": hf.get("n_shared_experts", default=0) * hf.get("moe_intermediate_size"),
        "num_groups": hf.get("n_group", default=1),
        "topk_groups": hf.get("topk_group", default=1),
        "normalize_weights": hf.get("norm_topk_prob", default=True),
        "route_scale": hf.get("routed_scaling_factor", default=1.0),
    }


def _write_deepseek_moe(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe.shared_hidden_dim % moe.hidden_dim:
        raise ConfigError(
            f"shared_hidden_dim = {moe.shared_hidden_dim}: config.json holds a multiple of hidden_dim = "
            f"{moe.hidden_dim} only."
        )
    return {
        "intermediate_size": config.ffn_dim or moe.hidden_dim,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_intermediate_size": moe.hidden_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_hidden_dim // moe.hidden_dim,
        "n_group": moe.num_groups,
        "topk_group": moe.topk_groups,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.route_scale,
    }


def _read_deepseek(hf: Reader) -> dict[str, Any]:
    hf.require("attention_bias", False)
    theta, scaling, _ = hf.rope(1e4)
    common = {key: value for key, value in _common(hf).items() if key not in ("head_dim", "num_kv_heads")}
    return (
        common
        | _read_deepseek_moe(hf)
        | {
            "norm_eps": hf.get("rms_norm_eps", default=1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rope_interleaved": hf.get("rope_interleave", default=True),
            **{key: hf.get(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            "q_lora_rank": hf.get("q_lora_rank", default=None),
        }
    )


def _read_deepseek_v3(hf: Reader) -> dict[str, Any]:
    hf.require("scoring_func", "sigmoid")
    hf.require("topk_method", "noaux_tc")
    return _read_deepseek(hf) | _SIGMOID


def _read_deepseek_v2(hf: Reader) -> dict[str, Any]:
    hf.require("scoring_func", "softmax")
    hf.require("topk_method", "greedy", "group_limited_greedy")
    # transformers does not normalise, whatever this key says; the original code does.
    hf.require("norm_topk_prob", False)
    values = _read_deepseek(hf) | {"normalize_weights": False}
    if hf.get("topk_method", default="greedy") == "greedy":
        return values | {"num_groups": 1, "topk_groups": 1}
    return values | {"group_score_k": 1, "group_mask": "zero"}


def _write_deepseek(config: ModelConfig) -> dict[str, Any]:
    ranks = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    return _write_deepseek_moe(config) | {
        **{key: getattr(config, key) for key in ranks},
        "moe_layer_freq": 1,
        "attention_bias": False,
    }


def _write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": config.rope_interleaved}
    return _write_deepseek(config) | own


def _write_deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    method = "greedy" if config.moe.num_groups == 1 else "group_limited_greedy"
    return _write_deepseek(config) | {"scoring_func": "softmax", "topk_method": method}


def _read_glm4_moe(hf: Reader) -> dict[str, Any]:
    theta, scaling, share = hf.rope(1e4)
    return (
        _common(hf)
        | _read_deepseek_moe(hf)
        | {
            "norm_eps": hf.get("rms_norm_eps", default=1e-5),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "partial_rotary_factor": 0.5 if share is None else share,
            "qk_norm": hf.get("use_qk_norm", default=False),
            "attention_bias": hf.get("attention_bias", default=False),
            **_SIGMOID,
        }
    )


def _write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return _write_deepseek_moe(config) | {
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.partial_rotary_factor,
        "use_qk_norm": config.qk_norm,
        "attention_bias": config.attention_bias,
    }


def _layer_types(num_layers: int, full_every: int) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return [kinds[(layer + 1) % full_every == 0] for layer in range(num_layers)]


def _read_gpt_oss(hf: Reader) -> dict[str, Any]:
    hf.require("attention_bias", True)
    layers = hf.get("num_hidden_layers")
    types = hf.get("layer_types", default=_layer_types(layers, 2))
    every = next((n for n in range(1, layers + 2) if _layer_types(layers, n) == types), None)
    if every is None:
        raise ConfigError(f"config.json: layer_types = {types}: full attention must come in every n-th layer.")
    theta, scaling, _ = hf.rope(150000.0)
    if hf.get("rope_scaling", "rope_parameters", default=None) is None:
        # transformers' own default of the family.
        scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
        scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return _common(hf) | {
        "head_dim": hf.get("head_dim", default=64),
        "norm_eps": hf.get("rms_norm_eps", default=1e-5),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": hf.get("sliding_window", default=128),
        "full_attention_every": every,
        "hidden_dim": hf.get("intermediate_size"),
        "num_experts": hf.get("num_local_experts", "num_experts"),
        "activation_limit": hf.get("swiglu_limit", default=7.0),
        "activation_alpha": hf.get("swiglu_alpha", default=1.702),
        **_CLAMPED,
    }


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "layer_types": _layer_types(config.num_layers, config.full_attention_every),
        "intermediate_size": config.moe.hidden_dim,
        "num_local_experts": config.moe.num_experts,
        "swiglu_limit": config.moe.activation_limit,
        "swiglu_alpha": config.moe.activation_alpha,
        "attention_bias": True,
    }


@dataclass(frozen=True)
class Translation:
    """How one ``model_type`` reads and writes."""

    family: str
    """Ours."""
    architecture: str
    read: Callable[[Reader], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


TRANSLATIONS = {
    "mixtral": Translation("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral),
    "qwen2_moe": Translation("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe),
    "qwen3_moe": Translation("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
    "deepseek_v2": Translation("deepseek_v3", "DeepseekV2ForCausalLM", _read_deepseek_v2, _write_deepseek_v2),
    "deepseek_v3": Translation("deepseek_v3", "DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3),
    "kimi_k2": Translation("kimi_k2", "DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3),
    "gpt_oss": Translation("gpt_oss", "GptOssForCausalLM", _read_gpt_oss, _write_gpt_oss),
    "glm4_moe": Translation("glm4_moe", "Glm4MoeForCausalLM", _read_glm4_moe, _write_glm4_moe),
    "minimax_m2": Translation("minimax_m2", "MiniMaxM2ForCausalLM", _read_minimax_m2, _write_minimax_m2),
}


def model_type(config: ModelConfig) -> str:
    """The ``model_type`` under which transformers knows a model of ours."""
    if config.family == "deepseek_v3" and config.moe.score_function == "softmax":
        return "deepseek_v2"
    # transformers has no model type of its own for Kimi-K2.
    return "deepseek_v3" if config.family == "kimi_k2" else config.family
