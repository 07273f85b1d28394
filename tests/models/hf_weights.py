"""Tiny transformers models with their twins of ours, and the mapping between their parameters."""

import torch
import transformers
from tiny_families import COMMON, FAMILIES
from torch import Tensor, nn

from titan_moe import models

HF = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "glm4_moe": "Glm4Moe",
}
"""transformers' name of each family of ours."""
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
    class_name = HF[family]
    torch.manual_seed(0)
    hf_config = getattr(transformers, class_name + "Config")(**{**COMMON, **FAMILIES[class_name], **(hf_extra or {})})
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
