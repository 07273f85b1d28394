"""Our model configurations and Hugging Face's ``config.json``, both ways.

Reads what transformers 5 writes (``rope_parameters``) and what older hub files hold (``rope_theta`` and
``rope_scaling``). Anything that our family cannot express is refused rather than read as something else.
"""

from dataclasses import fields
from typing import Any

import torch

from titan_moe.errors import ConfigError
from titan_moe.hf.families import TRANSLATIONS, Reader, model_type
from titan_moe.hf.refused import refusal
from titan_moe.models import FAMILIES, ModelConfig
from titan_moe.moe import MoEConfig

# Settings of training, which config.json has no place for; MTP depth is checked against the weights.
_NOT_IN_HF = {"mtp_depth", "mtp_loss_weight", "mtp_own_embeddings", "moe"}
_NOT_IN_HF_MOE = {
    *("bias_update_speed", "jitter", "router_dtype", "capacity_factor", "drop_policy", "pad_to_capacity"),
    *("aux_loss_coef", "seq_aux_loss_coef", "global_aux_loss_coef", "z_loss_coef", "pad_counts_to"),
    *("experts", "dispatcher", "recv_capacity_factor", "save"),
}


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Our configuration of a ``config.json``, without the multi-token-prediction layers that it may announce.

    Raises:
        ConfigError: for an unknown model type, a missing key, or a setting that our family cannot express.
    """
    kind = hf.get("model_type")
    if kind not in TRANSLATIONS:
        raise ConfigError(f"config.json: model_type = {kind!r} is not supported.{refusal(kind, TRANSLATIONS)}")
    _check_quantization(hf.get("quantization_config") or {})
    translation = TRANSLATIONS[kind]
    of_moe = {field.name for field in fields(MoEConfig)}
    try:
        values = translation.read(Reader(hf))
        moe = MoEConfig(**{key: value for key, value in values.items() if key in of_moe})
        rest = {key: value for key, value in values.items() if key not in of_moe or key == "dim"}
        return type(next(iter(FAMILIES[translation.family].flavors.values())))(**rest, moe=moe)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"config.json: a value has the wrong type: {error}.") from error


def config_to_hf(config: ModelConfig, origin: dict[str, Any], mtp_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of our configuration, one that transformers' own classes load.

    Args:
        config: ours.
        origin: the ``config.json`` that the model came from, whose other keys (token ids, say) are kept; or empty.
        mtp_layers: MTP layers in the export.
        dtype: of the weights.

    Raises:
        ConfigError: when transformers' model of this family differs from the configuration.
    """
    translation = TRANSLATIONS[model_type(config)]
    scaling = config.rope_scaling
    rope = {"rope_type": "default"} if scaling is None else scaling
    dropped = {"quantization_config", "auto_map", "torch_dtype", "num_mtp_layers", "id2label", "label2id"}
    hf = {key: value for key, value in origin.items() if key not in dropped}
    hf |= {
        "architectures": [translation.architecture],
        "model_type": model_type(config),
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts_per_tok": config.moe.top_k,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        # transformers 5 reads rope_parameters, older readers the other two.
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        **translation.write(config),
    }
    if mtp_layers or "n_routed_experts" in hf:
        hf["num_nextn_predict_layers"] = mtp_layers
    if "partial_rotary_factor" in hf:
        hf["rope_parameters"]["partial_rotary_factor"] = hf["partial_rotary_factor"]
    for name, ours, theirs in differences(config, config_from_hf(hf)):
        raise ConfigError(
            f"{name} = {ours!r}: transformers' {translation.architecture} has {theirs!r}, so an export would be "
            "another model."
        )
    return hf


def mtp_layers_in(hf: dict[str, Any]) -> int:
    """Multi-token-prediction layers that a ``config.json`` announces."""
    return hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0


def _check_quantization(quantization: dict[str, Any]) -> None:
    method = quantization.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise ConfigError(f"config.json: quant_method = {method!r} is not supported; only 'fp8' and 'mxfp4'.")
    block = quantization.get("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise ConfigError(f"config.json: weight_block_size = {block} is not supported; only [128, 128].")


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Fields of the architecture in which two configurations of one family differ, with both values."""
    skipped, skipped_moe = set(_NOT_IN_HF), set(_NOT_IN_HF_MOE)
    if not ours.num_dense_layers:
        skipped.add("ffn_dim")
    if ours.moe.num_groups == 1:
        skipped_moe |= {"group_score_k", "group_mask", "topk_groups"}
    if ours.moe.activation != "clamped_swiglu":
        skipped_moe |= {"activation_limit", "activation_alpha"}
    pairs = [(field.name, ours, theirs) for field in fields(ours) if field.name not in skipped]
    pairs += [(field.name, ours.moe, theirs.moe) for field in fields(ours.moe) if field.name not in skipped_moe]
    return [(n, getattr(a, n), getattr(b, n)) for n, a, b in pairs if getattr(a, n) != getattr(b, n)]
