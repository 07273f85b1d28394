"""Tiny transformers models with their twins of ours, and the mapping between their parameters."""

import torch
import transformers
from torch import Tensor, nn

from titan_moe import models

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "intermediate_size": 96}
_DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
HF = {
    "mixtral": ("Mixtral", {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_EXPERTS,
            **_DEEPSEEK,
            "num_key_value_heads": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_LAYERS,
            "intermediate_size": 32,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_EXPERTS,
            **_DEEPSEEK,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
}
_OURS_COMMON = {"vocab_size": 128, "dim": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 128, "top_k": 2}
OURS = {
    "mixtral": {"num_kv_heads": 2, "head_dim": 16, "hidden_dim": 96, "num_experts": 4, "rope_theta": 1e6},
    "qwen3_moe": {"num_kv_heads": 2, "head_dim": 16, "hidden_dim": 32},
    "deepseek_v3": {
        "hidden_dim": 32,
        "shared_hidden_dim": 32,
        "ffn_dim": 96,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_kv_heads": 2, "head_dim": 16, "hidden_dim": 32, "num_experts": 4, "sliding_window": 8},
    "glm4_moe": {
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_dim": 32,
        "shared_hidden_dim": 32,
        "ffn_dim": 96,
        "route_scale": 1.5,
        "attention_bias": False,
    },
}


def to_ours(family: str, hf_name: str, value: Tensor) -> tuple[str, Tensor]:
    """One in-memory transformers tensor under our name and layout. Linear, so that it maps gradients too."""
    name = hf_name.removeprefix("model.")
    name = name.replace("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias")
    name = name.replace("mlp.gate.weight", "mlp.router.weight").replace("mlp.shared_experts.", "mlp.shared.")
    if family == "gpt_oss" and ".experts." in name:
        if "gate_up_proj" in name:
            # Gate and up rows alternate; weights are stored transposed.
            rows = value if name.endswith("bias") else value.transpose(1, 2)
            value = torch.stack((rows[:, ::2], rows[:, 1::2]), dim=1)
        elif not name.endswith("bias"):
            value = value.transpose(1, 2)
        names = {"gate_up_proj": "w1", "gate_up_proj_bias": "b1", "down_proj": "w2", "down_proj_bias": "b2"}
        head, _, tail = name.rpartition(".")
        return f"{head}.{names[tail]}", value
    if name.endswith("experts.gate_up_proj"):
        return name.replace("gate_up_proj", "w1"), value.unflatten(1, (2, -1))
    return name.replace("experts.down_proj", "experts.w2"), value


def twins(
    family: str, hf_extra: dict | None = None, ours_extra: dict | None = None
) -> tuple[nn.Module, models.Decoder]:
    """A random tiny transformers model in fp32 and ours with the same weights, both in training mode."""
    class_name, settings = HF[family]
    torch.manual_seed(0)
    hf_config = getattr(transformers, class_name + "Config")(**{**_COMMON, **settings, **(hf_extra or {})})
    hf = getattr(transformers, class_name + "ForCausalLM")(hf_config).float().train()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            router = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
            if parameter.ndim > 1 or name.endswith(("bias", "sinks")):
                # A wide router keeps top-k away from ties.
                parameter.normal_(0, 0.5 if router else 0.05)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in hf.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    ours = models.build(family, "debug", **{**_OURS_COMMON, **OURS[family], **(ours_extra or {})})
    state = dict(to_ours(family, name, value) for name, value in hf.state_dict().items())
    if ours.lm_head is None:
        del state["lm_head.weight"]
    ours.load_state_dict(state, strict=True)
    return hf, ours.train()
