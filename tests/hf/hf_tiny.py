"""Tiny transformers models with random weights, their tensors under on-disk names, and folders of tensors."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import COMMON, FAMILIES
from torch import Tensor, nn


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
