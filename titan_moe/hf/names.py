"""Our tensor names and Hugging Face's, as one table that serves reading and writing.

``layouts`` maps one tensor of ours to the ways a file may hold it; each way is a list of ``Piece``s that cover
the tensor. The first layout is what hub checkpoints and ``save_pretrained`` write. Shapes: E experts, F expert
hidden, D model dim.
"""

import re
from dataclasses import dataclass

from torch import Tensor

from titan_moe.errors import CheckpointError

ALL = slice(None)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""``(offsets, sizes)`` of a part within a full tensor."""


@dataclass(frozen=True)
class Piece:
    """A part of one of our tensors as a part of a Hugging Face tensor: ``hf[region] = turn(ours[index])``.

    Attributes:
        index: a number for each dim of ours that the part has not, ``ALL`` for the others; may end early.
        region: start and step within each dim of the other tensor, ``ALL`` for the whole; may end early.
        transposed: whether ``turn`` exchanges the last two dims.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    region: tuple[slice, ...] = ()
    transposed: bool = False

    def turn(self, part: Tensor) -> Tensor:
        """From our order of dims to the file's, and back."""
        return part.transpose(-1, -2) if self.transposed else part

    def cut(self, box: Box) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
        """What of this piece lies in a box of ours: its index within the box, and its region of the other tensor.

        None when they do not meet.
        """
        local: list[int | slice] = []
        ranges: list[tuple[int, int]] = []
        for dim, (offset, size) in enumerate(zip(*box, strict=True)):
            at = self.index[dim] if dim < len(self.index) else ALL
            if size == 0 or (isinstance(at, int) and not offset <= at < offset + size):
                return None
            if isinstance(at, int):
                local.append(at - offset)
            else:
                local.append(ALL)
                ranges.append((offset, offset + size))
        if self.transposed:
            ranges[-2:] = ranges[-1], ranges[-2]
        region = []
        for dim, (first, end) in enumerate(ranges):
            whole = self.region[dim] if dim < len(self.region) else ALL
            start, step = whole.start or 0, whole.step or 1
            region.append(slice(start + first * step, start + (end - 1) * step + 1, step))
        return tuple(local), tuple(region)


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
    shared: str = "shared_experts"
    """The shared expert; the gate on it is called ``shared_expert_gate`` wherever it is there."""
    bias_on_block: bool = False
    """The selection bias lies on the block, not on the router."""


NAMES = {
    "mixtral": HFNames(block="block_sparse_moe", linears=("w1", "w3", "w2")),
    "minimax_m2": HFNames(block="block_sparse_moe", linears=("w1", "w3", "w2"), bias_on_block=True),
    "qwen2_moe": HFNames(shared="shared_expert"),
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
            on_router, on_block = f"{names.router}.e_score_correction_bias", "e_score_correction_bias"
            places = (on_block, on_router) if names.bias_on_block else (on_router, on_block)
            places += ("router.e_score_correction_bias", f"{names.router}.expert_bias")
            return [[Piece(f"{block}.{place}", shape)] for block in blocks for place in places]
        case ["mlp", "experts", kind]:
            return _experts(kind, shape, names, blocks)
        case ["mlp", "shared", ("gate_proj" | "up_proj" | "down_proj") as linear, "weight"]:
            return [[Piece(f"{block}.{names.shared}.{linear}.weight", shape)] for block in blocks]
        case ["mlp", "shared", "gate", "weight"] if names.shared == "shared_expert":
            return [[Piece(f"{block}.shared_expert_gate.weight", shape)] for block in blocks]
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
    E, *inner = shape
    each = [f"{block}.experts" for block in blocks]
    if names.interleaved:
        # Gate and up in alternate columns, weights transposed.
        stacked = f"{each[0]}.{'gate_up_proj' if kind in ('w1', 'b1') else 'down_proj'}{'_bias' * (kind[0] == 'b')}"
        if kind == "w1":
            n, F, D = inner
            hf = stacked, (E, D, n * F)
            return [[Piece(*hf, (ALL, i), (ALL, ALL, slice(i, None, n)), True) for i in range(n)]]
        if kind == "b1":
            n, F = inner
            return [[Piece(stacked, (E, n * F), (ALL, i), (ALL, slice(i, None, n))) for i in range(n)]]
        if kind == "w2":
            D, F = inner
            return [[Piece(stacked, (E, F, D), transposed=True)]]
        return [[Piece(stacked, shape)]]
    if kind == "w1":
        n, F, D = inner
        parts = [((e, i), names.linears[i]) for e in range(E) for i in range(n)]
        stacked = [
            [Piece(f"{home}.gate_up_proj", (E, n * F, D), (ALL, i), (ALL, slice(i * F, (i + 1) * F))) for i in range(n)]
            for home in each
        ]
    elif kind == "w2":
        parts = [((e,), names.linears[2]) for e in range(E)]
        stacked = [[Piece(f"{home}.down_proj", shape)] for home in each]
    else:
        raise CheckpointError(f"experts.{kind}: this family has no such tensor on the Hugging Face side.")
    matrix = tuple(inner[-2:])
    on_disk = [[Piece(f"{home}.{at[0]}.{linear}.weight", matrix, at) for at, linear in parts] for home in each]
    return on_disk + stacked
