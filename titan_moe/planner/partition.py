"""Layers over pipeline stages by what they cost, and the layout string of the result."""

from typing import Any

from titan_moe.models.count import Shape, mtp_is_dense


def balanced_stages(shape: Shape, stages: int, cost: list[float]) -> list[dict[str, Any]]:
    """Layers in order over ``stages``, so that the dearest stage is as cheap as it can be.

    Args:
        shape: the model's sizes.
        stages: how many; none is left empty.
        cost: of a dense layer, a MoE layer, an MTP joint, a head.
    """
    of_mtp = cost[0 if mtp_is_dense(shape) else 1] + cost[2]
    units = [("layers", i, cost[0 if i < shape.num_dense else 1]) for i in range(shape.num_layers)]
    units += [("mtp", i, of_mtp) for i in range(shape.mtp)] + [("head", True, cost[3])]
    low, high = max(unit[2] for unit in units), sum(unit[2] for unit in units)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_greedy(units, middle, stages)) <= stages else (middle, high)
    parts = _greedy(units, high, stages)
    out: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        stage: dict[str, Any] = {"embedding": index == 0, "layers": [], "mtp": [], "head": False}
        for kind, value, _ in part:
            if kind == "head":
                stage["head"] = True
            else:
                stage[kind].append(value)
        out.append(stage)
    return out


def _greedy(units: list[tuple], most: float, stages: int) -> list[list[tuple]]:
    """Units packed into stages of at most ``most``, at least one for each of ``stages``."""
    parts: list[list[tuple]] = [[]]
    filled = 0.0
    for index, unit in enumerate(units):
        # What is left must suffice to give each stage that is left one unit.
        short = len(units) - index <= stages - len(parts)
        if parts[-1] and (filled + unit[2] > most * (1 + 1e-9) or short):
            parts.append([])
            filled = 0.0
        parts[-1].append(unit)
        filled += unit[2]
    return parts


def layout_text(stages: list[dict[str, Any]]) -> str:
    """The layout string, with runs of layers as ``t*n``."""
    parts = []
    for stage in stages:
        t, m = len(stage["layers"]), len(stage["mtp"])
        layers = "t" * t if t < 3 else f"t*{t}"
        parts.append("E" * stage["embedding"] + layers + "m" * m + "L" * stage["head"])
    text, at = [], 0
    while at < len(parts):
        run = 1
        while at + run < len(parts) and parts[at + run] == parts[at]:
            run += 1
        # The last stage has no bar behind it, so it stands outside the group.
        grouped = run - (at + run == len(parts))
        if grouped > 2:
            text.append(f"({parts[at]}|)*{grouped}")
            at += grouped
        else:
            text.append(parts[at] + ("|" if at + 1 < len(parts) else ""))
            at += 1
    return "".join(text)
