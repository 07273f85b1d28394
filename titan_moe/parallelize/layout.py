"""The flexible pipeline layout (report section 7.5): which layers each pipeline stage holds, as a string.

``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` head and loss; ``|`` ends a stage; ``x*n`` repeats a
letter and ``(...)*n`` a group. The stages are numbered as written. Stage ``s`` of ``pp * vpp`` is chunk ``s // pp``
of pipeline rank ``s % pp``; under the schedules that fold the pipeline into a V, odd chunks run backwards, so that
rank r holds stages r and ``2 * pp - 1 - r``.
"""

import re
from dataclasses import dataclass

from titan_moe.errors import ConfigError

_TOKEN = re.compile(r"\s*(?:(?P<letter>[EtmL|])|(?P<open>\()|(?P<close>\))|\*(?P<count>\d+))")
# Far beyond any model: what is over it is a slip.
_LONGEST = 100_000


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: global indices of its decoder and MTP layers, and the ends of the model."""

    embedding: bool
    layers: tuple[int, ...]
    mtp: tuple[int, ...]
    head: bool


def expand(text: str) -> str:
    """The layout without ``*`` and parentheses, such as ``"Ett|tt|L"``.

    Raises:
        ConfigError: a character that is no layout letter, parentheses or counts that do not fit, or a count far
            beyond any model.
    """
    stack: list[list[str]] = [[]]
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ConfigError(
                f"pipeline layout {text!r}: cannot read {text[at:].strip()[:1]!r} at position {at}. "
                "Letters are E, t, m, L and |; repeat with *n."
            )
        if match["letter"]:
            stack[-1].append(match["letter"])
        elif match["open"]:
            stack.append([])
        elif match["close"]:
            if len(stack) == 1:
                raise ConfigError(f"pipeline layout {text!r}: ')' at position {at} closes nothing.")
            group = "".join(stack.pop())
            stack[-1].append(group)
        else:
            if not stack[-1]:
                raise ConfigError(f"pipeline layout {text!r}: '*' at position {at} repeats nothing.")
            count = int(match["count"])
            if len(stack[-1][-1]) * count > _LONGEST:
                raise ConfigError(
                    f"pipeline layout {text!r}: '*{count}' at position {at} makes more than {_LONGEST} letters."
                )
            stack[-1][-1] *= count
        at = match.end()
    if len(stack) > 1:
        raise ConfigError(f"pipeline layout {text!r}: a '(' is not closed.")
    return "".join(stack[0])


def parse_layout(text: str, *, num_layers: int, mtp_depth: int, pp: int, vpp: int) -> list[Stage]:
    """The stages of ``text``, in order.

    Raises:
        ConfigError: the string does not hold the model's layers in order, or not ``pp * vpp`` stages.
    """
    flat = expand(text)
    parts = flat.split("|")
    if len(parts) != pp * vpp:
        raise ConfigError(
            f"pipeline layout {text!r} has {len(parts)} stages; pipeline_parallel_degree {pp} x "
            f"virtual_pipeline_degree {vpp} needs {pp * vpp}. Move, add or drop a '|'."
        )
    letters = flat.replace("|", "")
    wanted = "E" + "t" * num_layers + "m" * mtp_depth + "L"
    for letter, name in (("E", "embedding"), ("t", "decoder layers"), ("m", "MTP layers"), ("L", "head")):
        if letters.count(letter) != wanted.count(letter):
            raise ConfigError(
                f"pipeline layout {text!r} has {letters.count(letter)} {letter!r} ({name}); "
                f"the model has {wanted.count(letter)}."
            )
    if letters != wanted:
        raise ConfigError(f"pipeline layout {text!r}: the order must be E, all t, all m, L.")
    stages, layer, mtp = [], 0, 0
    for part in parts:
        t, m = part.count("t"), part.count("m")
        stages.append(Stage("E" in part, tuple(range(layer, layer + t)), tuple(range(mtp, mtp + m)), "L" in part))
        layer, mtp = layer + t, mtp + m
    return stages


def default_layout(*, num_layers: int, mtp_depth: int, pp: int, vpp: int) -> str:
    """Decoder layers spread evenly, the earlier stages taking the remainder; the head counts as one layer."""
    stages = pp * vpp
    units = num_layers + mtp_depth + 1
    sizes = [units // stages + (s < units % stages) for s in range(stages)]
    body = "t" * num_layers + "m" * mtp_depth + "L"
    parts, at = [], 0
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    return "E" + "|".join(parts)


def rank_of_stage(stage: int, pp: int, *, v_shaped: bool = False) -> int:
    """The pipeline rank that holds ``stage``."""
    chunk, place = divmod(stage, pp)
    return pp - 1 - place if v_shaped and chunk % 2 else place


def stages_of_rank(rank: int, pp: int, vpp: int, *, v_shaped: bool = False) -> list[int]:
    """The stages of one pipeline rank, in the order of the model."""
    return [stage for stage in range(pp * vpp) if rank_of_stage(stage, pp, v_shaped=v_shaped) == rank]


def draw_layout(stages: list[Stage], pp: int, vpp: int, *, v_shaped: bool = False) -> str:
    """A plain text table: one row per pipeline rank, one column per chunk, with what each stage holds."""
    rows = [["", *(f"chunk {chunk}" for chunk in range(vpp))]]
    for rank in range(pp):
        held = stages_of_rank(rank, pp, vpp, v_shaped=v_shaped)
        rows.append([f"pp rank {rank}", *(f"stage {index}: {describe_stage(stages[index])}" for index in held)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def describe_stage(stage: Stage) -> str:
    """What a stage holds in words, such as ``embedding, layers 0-2``."""
    parts = ["embedding"] if stage.embedding else []
    for name, held in (("layer", stage.layers), ("MTP layer", stage.mtp)):
        if len(held) == 1:
            parts.append(f"{name} {held[0]}")
        elif held:
            parts.append(f"{name}s {held[0]}-{held[-1]}")
    if stage.head:
        parts.append("head")
    return ", ".join(parts) or "nothing"
