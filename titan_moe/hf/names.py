"""Our tensor names and Hugging Face's, as one table that serves reading and writing.

``layouts`` maps one tensor of ours to the ways a file may hold it; each way is a list of ``Piece``s that cover
the tensor. The first layout is what hub checkpoints and ``save_pretrained`` write. Shapes: E experts, F expert
hidden, D model dim.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from titan_moe.errors import CheckpointError


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Piece:
    """One tensor of a Hugging Face file as a part of one of ours: ``hf = to_hf(ours[index])`` and back."""

    hf_name: str
    hf_shape: tuple[int, ...]
    index: tuple[int, ...] = ()
    to_hf: Callable[[Tensor], Tensor] = _same
    from_hf: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True)
class HFNames:
    """Where a family's names differ."""

    block: str = "mlp"
    """Name of the MoE block on disk; transformers 5 calls it ``mlp`` in memory."""
    router: str = "gate"
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of one expert on disk."""
    interleaved: bool = False
    """Experts are stacked on disk too, ``[E, D, 2F]`` with gate and up in alternate columns (GPT-OSS)."""


NAMES = {
    "mixtral": HFNames(block="block_sparse_moe", linears=("w1", "w3", "w2")),
    "qwen3_moe": HFNames(),
    "deepseek_v3": HFNames(),
    "kimi_k2": HFNames(),
    "glm4_moe": HFNames(),
    "gpt_oss": HFNames(router="router", interleaved=True),
}


_ROUTER = re.compile(r"\.(gate|router)\.(weight|bias)$|e_score_correction_bias$|expert_bias$")


def layouts(name: str, shape: tuple[int, ...], family: str, num_layers: int) -> list[list[Piece]]:
    """The ways a Hugging Face checkpoint may hold our tensor ``name``, the one to write first.

    Args:
        name: a parameter or buffer of a model in ``titan_moe.models``.
        shape: its global shape.
        family: a key of ``NAMES``.
        num_layers: decoder layers without MTP layers; those follow at ``model.layers.{num_layers + d}``.

    Raises:
        CheckpointError: when Hugging Face has no name for the tensor.
    """
    names = NAMES[family]
    if name == "lm_head.weight":
        return [[Piece(name, shape)]]
    if name in ("embed_tokens.weight", "norm.weight"):
        return [[Piece(f"model.{name}", shape)]]
    prefix, rest = _locate(name, num_layers)
    # The in-memory name of the block is accepted wherever it differs from the one on disk.
    blocks = [f"{prefix}.{block}" for block in dict.fromkeys((names.block, "mlp"))]
    match rest.split("."):
        case ["mlp", "router", ("weight" | "bias") as kind]:
            return [[Piece(f"{block}.{names.router}.{kind}", shape)] for block in blocks]
        case ["mlp", "router", "expert_bias"]:
            # On the gate (DeepSeek, GLM), on the block (MiniMax), on a nested router, or under Ling's name.
            places = (f"{names.router}.e_score_correction_bias", "e_score_correction_bias")
            places += ("router.e_score_correction_bias", f"{names.router}.expert_bias")
            return [[Piece(f"{block}.{place}", shape)] for block in blocks for place in places]
        case ["mlp", "experts", kind]:
            return _experts(kind, shape, names, blocks)
        case ["mlp", "shared", ("gate_proj" | "up_proj" | "down_proj") as linear, "weight"]:
            return [[Piece(f"{block}.shared_experts.{linear}.weight", shape)] for block in blocks]
        case ["mlp", ("gate_proj" | "up_proj" | "down_proj"), "weight"]:
            return [[Piece(f"{prefix}.{rest}", shape)]]
        case ["embed_tokens" | "shared_head", *_] if name.startswith("mtp."):
            return [[Piece(f"{prefix}.{rest}", shape)]]
        case [("input_layernorm" | "post_attention_layernorm" | "enorm" | "hnorm" | "eh_proj"), "weight"]:
            return [[Piece(f"{prefix}.{rest}", shape)]]
        case ["self_attn", *_]:
            return [[Piece(f"{prefix}.{rest}", shape)]]
    raise CheckpointError(f"{name}: Hugging Face's {family} has no name for this tensor.")


def pieces(name: str, shape: tuple[int, ...], family: str, num_layers: int) -> list[Piece]:
    """The pieces under which our tensor ``name`` is written. See ``layouts``."""
    return layouts(name, shape, family, num_layers)[0]


def repeats(name: str, num_layers: int, mtp_depth: int, tied: bool) -> list[str]:
    """Names under which a file may repeat our tensor: MTP layers on the hub hold the shared embedding and head.

    A file of a tied model may also repeat its embedding as ``lm_head.weight``. Models whose MTP layers have their
    own embedding and head hold them under ``mtp.{d}``; they give ``mtp_depth = 0``.
    """
    parts = {"embed_tokens.weight": ["embed_tokens.weight"], "lm_head.weight": ["shared_head.head.weight"]}.get(
        name, []
    )
    names = []
    if tied and name == "embed_tokens.weight":
        parts += ["shared_head.head.weight"]
        names = ["lm_head.weight"]
    return names + [f"model.layers.{num_layers + d}.{part}" for d in range(mtp_depth) for part in parts]


def is_router(hf_name: str) -> bool:
    """Whether a tensor belongs to a router, which computes in fp32 whatever the rest has."""
    return _ROUTER.search(hf_name) is not None


def _locate(name: str, num_layers: int) -> tuple[str, str]:
    match name.split("."):
        case ["layers", layer, *rest]:
            return f"model.layers.{layer}", ".".join(rest)
        case ["mtp", depth, "layer", *rest]:
            return f"model.layers.{num_layers + int(depth)}", ".".join(rest)
        case ["mtp", depth, ("norm" | "lm_head") as part, "weight"]:
            part = "norm" if part == "norm" else "head"
            return f"model.layers.{num_layers + int(depth)}", f"shared_head.{part}.weight"
        case ["mtp", depth, *rest]:
            return f"model.layers.{num_layers + int(depth)}", ".".join(rest)
    return "", name


def _experts(kind: str, shape: tuple[int, ...], names: HFNames, blocks: list[str]) -> list[list[Piece]]:
    E = shape[0]
    if kind == "w1":
        _, n, F, D = shape
        per_expert = [((e, i), names.linears[i], (F, D)) for e in range(E) for i in range(n)]
        rows = ("gate_up_proj", (E, n * F, D), lambda x: x.reshape(E, n * F, D), lambda x: x.reshape(shape))
        columns = (
            "gate_up_proj",
            (E, D, n * F),
            lambda x: x.permute(0, 3, 2, 1).reshape(E, D, n * F),
            lambda x: x.reshape(E, D, F, n).permute(0, 3, 2, 1),
        )
    elif kind == "w2":
        _, D, F = shape
        per_expert = [((e,), names.linears[2], (D, F)) for e in range(E)]
        rows = ("down_proj", shape, _same, _same)
        columns = ("down_proj", (E, F, D), lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2))
    elif names.interleaved and kind == "b1":
        _, n, F = shape
        columns = (
            "gate_up_proj_bias",
            (E, n * F),
            lambda x: x.transpose(1, 2).reshape(E, n * F),
            lambda x: x.reshape(E, F, n).transpose(1, 2),
        )
    elif names.interleaved and kind == "b2":
        columns = ("down_proj_bias", shape, _same, _same)
    else:
        raise CheckpointError(f"experts.{kind}: this family has no such tensor on the Hugging Face side.")

    if names.interleaved:
        hf_name, hf_shape, to_hf, from_hf = columns
        return [[Piece(f"{blocks[0]}.experts.{hf_name}", hf_shape, (), to_hf, from_hf)]]
    hf_name, hf_shape, to_hf, from_hf = rows
    on_disk = [
        [Piece(f"{block}.experts.{index[0]}.{linear}.weight", part, index) for index, linear, part in per_expert]
        for block in blocks
    ]
    stacked = [[Piece(f"{block}.experts.{hf_name}", hf_shape, (), to_hf, from_hf)] for block in blocks]
    return on_disk + stacked
