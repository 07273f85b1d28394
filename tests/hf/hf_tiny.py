"""Tiny transformers models with random weights, their tensors under on-disk names, and folders of tensors."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

COMMON = {
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
_SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}

FAMILIES = {
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True},
    "DeepseekV3": {**_EXPERTS, **_SIGMOID, **_MLA, **_GROUPS, "num_key_value_heads": 4},
    "DeepseekV2": {
        **{**_EXPERTS, **_SIGMOID, **_MLA, **_GROUPS, "norm_topk_prob": False, "q_lora_rank": None},
        **{"num_key_value_heads": 4, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
    },
    "GptOss": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Glm4Moe": {**_EXPERTS, **_SIGMOID, **_NO_GROUPS, "head_dim": 16, "use_qk_norm": True},
    "MiniMaxM2": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}


def hf_model(family: str, **changes) -> nn.Module:
    """A transformers model in fp32 and training mode, every weight random and no expert bias zero."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide router weights: no two experts of a token are nearly equal.
            if name.endswith((".gate.weight", ".router.weight")):
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1 or name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.05)
            else:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def on_disk(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Stacked in-memory tensors of transformers 5, split into the names on disk."""
    if family == "GptOss":
        return dict(tensors)
    block = family in ("Mixtral", "MiniMaxM2")
    names = ("w1", "w3", "w2") if block else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, tensor in tensors.items():
        if block:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            prefix, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for e in range(tensor.shape[0]):
                out[f"{prefix}{e}.{names[0]}.weight"] = tensor[e, :half]
                out[f"{prefix}{e}.{names[1]}.weight"] = tensor[e, half:]
        elif name.endswith("experts.down_proj"):
            for e in range(tensor.shape[0]):
                out[f"{name.removesuffix('down_proj')}{e}.{names[2]}.weight"] = tensor[e]
        else:
            out[name] = tensor
    return out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Puts other tensors into a folder of one file."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    """Changes keys of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Same names, same values, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
