"""The fastest layouts that fit: all legal ones bounded, then predicted in the order of their bounds.

The bound of a candidate is the work of its busiest rank, without bubble or waiting, so that no candidate whose bound
is beyond the best predictions can beat them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from titan_moe.config import to_toml
from titan_moe.config.degrees import divisors
from titan_moe.errors import ConfigError
from titan_moe.models import config as model_config_of
from titan_moe.models.count import (
    Shape,
    dense_parameters,
    expert_parameters,
    mtp_is_dense,
    mtp_joint_parameters,
    router_parameters,
    shape_of,
)
from titan_moe.planner.activations import all_bytes, bytes_with, layer_rows, mtp_rows
from titan_moe.planner.command import Flags, config_of, options_of
from titan_moe.planner.compose import even_stages, refusal
from titan_moe.planner.costs import head_seconds, joint_seconds, layer_seconds, total_of
from titan_moe.planner.explain import binding_wall, shares
from titan_moe.planner.memory import GIB, limit_gib, rank_memory
from titan_moe.planner.partition import balanced_stages, layout_text
from titan_moe.planner.predict import predict
from titan_moe.planner.run import Run, plan_of
from titan_moe.planner.schedules import folds, rank_of
from titan_moe.planner.systems import System
from titan_moe.planner.terminal import as_json, layout_line

TOKENS = 1 << 25
"""Tokens of a step where --gbs is not given: 8,192 sequences of 4,096, as in the report."""
WIDEST_VPP = 12


@dataclass
class Found:
    """One candidate, predicted."""

    flags: Flags
    run: Run
    result: dict[str, Any]

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.result["tokens_per_s_per_gpu"]


def run_search(flags: Flags, system: System, given: dict[str, Any]) -> None:
    """Search, explain and print; write the best as TOML where asked.

    Raises:
        ConfigError: nothing is legal, or nothing fits.
    """
    if flags.model is None or flags.gpus is None:
        raise ConfigError("--search needs --model and --gpus.")
    shape = shape_of(model_config_of(config_of(flags).model.name, config_of(flags).model.flavor, **_override(flags)))
    found = search(flags, system, set(given), shape, progress=not flags.json)
    if flags.toml:
        _write_toml(Path(flags.toml), found[0])
    if flags.json:
        best = found[0]
        print(as_json(best.result | {"layout": _layout(best), "alternatives": [_layout(other) for other in found[1:]]}))
        return
    console = Console(highlight=False)
    for place, item in enumerate(found, start=1):
        memory = item.result["memory_gib"]["total"]
        console.print(
            f"{place}. {item.result['tflops_per_gpu']:.0f} TFLOPS, {item.speed:.0f} tokens per s and GPU, "
            f"{memory:.1f} of {item.result['limit_gib']:.1f} GiB, bound by {binding_wall(item.result)}\n"
            f"   {layout_line(item.run)}\n   {item.flags.pp_layout or 'one stage'}"
        )
    if len(found) > 1:
        console.print(why_first(found[0], found[1]))
    if flags.toml:
        console.print(f"wrote {flags.toml}")


def search(flags: Flags, system: System, given: set[str], shape: Shape, *, progress: bool = False) -> list[Found]:
    """The ``flags.top`` fastest candidates that fit, the fastest first.

    Args:
        flags: what is asked; the options in ``given`` stay as they are.
        system: the machine.
        given: names of the options that the user set.
        shape: the model's sizes.
        progress: draw a bar on the terminal.

    Raises:
        ConfigError: nothing is legal, or nothing fits.
    """
    space = _Space(flags, system, given, shape)
    candidates = sorted(space.candidates(), key=lambda candidate: candidate[0])
    if not candidates:
        raise ConfigError(
            f"--search: no legal layout of {flags.model} on {flags.gpus} x {system.name} comes near to fitting, with "
            "the options given. Leave some out, or use more GPUs."
        )
    found: list[Found] = []
    least: tuple[float, str] | None = None
    for bound, place, method, text in track(candidates, "searching", transient=True, disable=not progress):
        if len(found) == flags.top and bound >= found[-1].result["step_time_s"]:
            break
        for candidate in space.savings(place, method, text):
            try:
                _, run = plan_of(config_of(candidate), candidate.gpus, options_of(candidate), system)
            except ConfigError:
                # The bounds leave out rules on how micro-batches divide; the trainer's own check decides.
                break
            over = _overflow(shape, run, system)
            if over <= 0:
                found.append(Found(candidate, run, predict(shape, run, system)))
                found.sort(key=lambda item: -item.speed)
                del found[flags.top :]
                break
            if least is None or over < least[0]:
                least = over, layout_line(run)
    if not found:
        raise ConfigError(
            f"--search: none of {len(candidates)} layouts of {flags.model} fits {flags.gpus} x {system.name}; the "
            f"nearest needs {least[0]:.1f} GiB more: {least[1]}. Use more GPUs, or a system with more memory."
        )
    return found


def _overflow(shape: Shape, run: Run, system: System) -> float:
    """GiB beyond the limit on the worst rank; negative where the run fits."""
    limit = limit_gib(system)
    worst = rank_memory(shape, run, 0)["total"]
    if worst <= limit:
        worst = max(worst, *(rank_memory(shape, run, rank)["total"] for rank in range(run.pp)))
    return worst - limit


def _override(flags: Flags) -> dict[str, Any]:
    return config_of(flags).model.override


def _recompute_ladder(shape: Shape) -> list[list[str]]:
    """Recompute targets, from none to whole layers: cheap ones first."""
    ladder: list[list[str]] = [[]]
    if shape.num_dense:
        ladder.append(["mlp"])
    cheap = [*ladder[-1], "layernorm", "moe_act"]
    ladder.append(cheap)
    if shape.latent:
        ladder.append([*cheap, "mla_up_proj"])
    if shape.shared_hidden:
        ladder.append([*ladder[-1], "shared_experts"])
    ladder += [[*ladder[-1], "core_attn"], ["full"]]
    return ladder


class _Space:
    """All legal candidates, each a place (the layout of ranks), a method (what is traded) and a layout of stages."""

    def __init__(self, flags: Flags, system: System, given: set[str], shape: Shape) -> None:
        self.flags, self.system, self.given, self.shape = flags, system, given, shape
        fast = "mxfp8" if system.peak_fp4 else "fp8_block"
        self.base = replace(
            flags,
            gbs=flags.gbs or max(1, TOKENS // flags.seq),
            dispatcher=self.choose("dispatcher", ["hybridep" if system.domain > 8 else "deepep"])[0],
            cuda_graph=self.choose("cuda_graph", [system.domain > 8])[0],
            memory_efficient_permutation=True,
        )
        self.methods = [
            {"precision": precision, "ep_overlap": overlap, "recompute": recompute}
            for precision in self.choose("precision", [fast, "bf16"] if system.peak_fp8 else ["bf16"])
            for overlap in self.choose("ep_overlap", [False, True])
            for recompute in self.choose("recompute", _recompute_ladder(shape))
        ]
        # What saves memory at next to no time: tried in this order for every candidate.
        self.saving = [
            {"moments": moments, "offload": offload}
            for offload in self.choose("offload", [[], ["optimizer"]])
            for moments in self.choose("moments", ["fp32", "bf16"])
        ]
        self.costs: dict[tuple, tuple[list[float], list[float]]] = {}
        self.layouts: dict[tuple, list[tuple[str, list[list[int]]]]] = {}

    def choose(self, name: str, values: list[Any]) -> list[Any]:
        """What the user set, else ``values``."""
        return [getattr(self.flags, name)] if name in self.given else values

    def places(self) -> Iterator[Flags]:
        """Every legal layout of ranks."""
        gpus, shape, choose = self.flags.gpus, self.shape, self.choose
        longest = max(1, self.flags.seq // 4096)
        degrees = product(
            choose("tp", [d for d in divisors(shape.kv_heads) if d <= min(8, self.system.domain)]),
            choose("cp", [d for d in divisors(gpus) if d <= longest]),
            choose("pp", [d for d in divisors(gpus) if d <= min(32, shape.num_layers)]),
            choose("ep", [d for d in divisors(gpus) if d <= shape.experts]),
            choose("vpp", list(range(1, WIDEST_VPP + 1))),
            choose("mbs", [1, 2, 4]),
        )
        for tp, cp, pp, ep, vpp, mbs in degrees:
            if pp == 1 and vpp > 1:
                continue
            schedule = self.choose("schedule", ["Interleaved1F1B" if vpp > 1 else "1F1B"])[0]
            place = replace(self.base, tp=tp, cp=cp, pp=pp, ep=ep, vpp=vpp, mbs=mbs, schedule=schedule)
            if not refusal(shape, self.system, place):
                yield place

    def candidates(self) -> Iterator[tuple[float, Flags, dict[str, Any], str]]:
        """``(seconds that the step takes at least, place, method, layout string)`` of what may fit."""
        limit = limit_gib(self.system)
        for place in self.places():
            count = place.gbs // (place.gpus // (place.pp * place.tp * place.cp)) // place.mbs
            least = self.least_static(place)
            for method in self.methods:
                if method["ep_overlap"] and (place.pp == 1 or place.ep == 1):
                    continue
                cost, kept = self.cost(place, method)
                for text, ranks in self.stages(place, cost):
                    if self.least_memory(place, ranks, least, kept, count) > limit:
                        continue
                    busiest = max(sum(n * c for n, c in zip(rank, cost, strict=True)) for rank in ranks)
                    yield count * busiest, place, method, text

    def savings(self, place: Flags, method: dict[str, Any], text: str) -> Iterator[Flags]:
        """The candidate with ever more of what saves memory at next to no time."""
        layout = text if place.pp > 1 else None
        for saving in self.saving:
            yield replace(place, pp_layout=layout, **method, **saving)

    def cost(self, place: Flags, method: dict[str, Any]) -> tuple[list[float], list[float]]:
        """Seconds forward and back, and GiB that a pass keeps: of a dense and a MoE layer, an MTP joint, the heads."""
        key = (place.tp, place.cp, place.ep, place.mbs, *method.values())
        key = tuple(tuple(part) if isinstance(part, list) else part for part in key)
        if key not in self.costs:
            view = _View(place, method)
            self.costs[key] = _costs(self.shape, view, self.system), _kept(self.shape, view)
        return self.costs[key]

    def stages(self, place: Flags, cost: list[float]) -> list[tuple[str, list[list[int]]]]:
        """Layout strings for the place, each with what every rank holds of the kinds in ``cost``."""
        key = place.pp, place.vpp, place.schedule
        if key not in self.layouts:
            self.layouts[key] = _layouts(self.shape, place, cost)
        return self.layouts[key]

    def least_static(self, place: Flags) -> list[float]:
        """GiB of weights and gradients of the kinds in ``cost``: what no method saves."""
        s = self.shape
        expert = s.experts / (place.ep * place.etp) * expert_parameters(s)
        moe = dense_parameters(s, False, place.tp) + router_parameters(s) + expert
        elements = [dense_parameters(s, True, place.tp), moe, mtp_joint_parameters(s), s.vocab * s.dim / place.tp]
        return [6 * count / GIB for count in elements]

    def least_memory(
        self, place: Flags, ranks: list[list[int]], static: list[float], kept: list[float], count: int
    ) -> float:
        """GiB that the fullest rank needs, or a little less: its passes taken as spread evenly over its stages."""
        most = 0.0
        for rank, held in enumerate(ranks):
            behind = place.pp - 1 - rank
            passes = (place.vpp - 1) * place.pp + 2 * behind + 1 if place.vpp > 1 else behind + 1
            share = 0.85 * min(passes, count * place.vpp) / place.vpp
            parts = zip(held, static, kept, strict=True)
            most = max(most, sum(n * (weight + share * activation) for n, weight, activation in parts))
        return most


def _costs(shape: Shape, view: "_View", system: System) -> list[float]:
    # Layers differ by their window; the shortest bounds the rest.
    windows = [window for window in shape.windows if window > 0]
    window = min(windows) if windows else 0
    dense, moe = (
        sum(total_of(phase) for phase in layer_seconds(shape, view, system, kind, window).values()) if exists else 0.0
        for kind, exists in ((True, shape.num_dense > 0), (False, shape.num_dense < shape.num_layers))
    )
    joint = 3 * joint_seconds(shape, view, system) if shape.mtp else 0.0
    return [dense, moe, joint, 3 * (1 + shape.mtp) * head_seconds(shape, view, system)]


def _kept(shape: Shape, view: "_View") -> list[float]:
    dense = bytes_with(layer_rows(shape, view, True), view, "kept") if shape.num_dense else 0.0
    moe = bytes_with(layer_rows(shape, view, False), view, "kept") if shape.num_dense < shape.num_layers else 0.0
    # Of the heads hardly more than one pass is in flight.
    return [dense / GIB, moe / GIB, all_bytes(mtp_rows(shape, view)) / GIB, 0.0]


class _View:
    """The options of a candidate as the formulas of layers read them."""

    engine = "megatron"
    offload_fraction = 1
    offload_least = 0

    def __init__(self, place: Flags, method: dict[str, Any]) -> None:
        self.__dict__ |= vars(place) | {"lengths": options_of(place).lengths} | method


def _layouts(shape: Shape, flags: Flags, cost: list[float]) -> list[tuple[str, list[list[int]]]]:
    """Layout strings for the candidate's stages, each with what every rank holds of the kinds in ``_costs``."""
    if flags.pp_layout:
        from titan_moe.parallelize.layout import parse_layout

        parts = parse_layout(
            flags.pp_layout, num_layers=shape.num_layers, mtp_depth=shape.mtp, pp=flags.pp, vpp=flags.vpp
        )
        texts = {flags.pp_layout: [vars(stage) for stage in parts]}
    else:
        even = even_stages(shape, flags.pp, flags.vpp)
        texts = {layout_text(even): even}
        balanced = balanced_stages(shape, flags.pp * flags.vpp, cost)
        texts[layout_text(balanced)] = balanced
    out = []
    for text, stages in texts.items():
        ranks = [[0, 0, 0, 0] for _ in range(flags.pp)]
        for index, stage in enumerate(stages):
            held = ranks[rank_of(index, flags.pp, folds(flags.schedule))]
            dense = sum(layer < shape.num_dense for layer in stage["layers"])
            held[0] += dense
            held[1] += len(stage["layers"]) - dense
            held[0 if mtp_is_dense(shape) else 1] += len(stage["mtp"])
            held[2] += len(stage["mtp"])
            held[3] += stage["head"]
        out.append((text, ranks))
    return out


def _layout(item: Found) -> dict[str, Any]:
    """A candidate as the options of the command, with its speed."""
    names = "tp cp pp vpp ep etp mbs gbs schedule pp_layout precision recompute offload dispatcher ep_overlap".split()
    names += ["cuda_graph", "moments", "memory_efficient_permutation", "moe_save", "recv_capacity_factor"]
    options = {name: getattr(item.flags, name) for name in names}
    return options | {"tokens_per_s_per_gpu": item.speed, "bound_by": binding_wall(item.result)}


def why_first(first: Found, second: Found) -> str:
    """In a sentence, what the best layout gains on the second and what it pays for it."""
    a, b = first.result, second.result
    change = {name: b["time_s"].get(name, 0) - a["time_s"].get(name, 0) for name in shares(a).keys() | shares(b).keys()}
    gains = sorted(change.items(), key=lambda pair: -pair[1])
    step = a["step_time_s"]
    saved = ", ".join(f"{name} {seconds / step:.1%}" for name, seconds in gains[:2] if seconds > 0.0005 * step)
    paid = ", ".join(f"{name} {-seconds / step:.1%}" for name, seconds in gains[:-3:-1] if -seconds > 0.0005 * step)
    return (
        f"the first beats the second by {first.speed / second.speed - 1:.1%} of the step: it saves "
        f"{saved or 'nothing in any one part'}{f' and pays {paid}' if paid else ''}."
    )


def _write_toml(path: Path, best: Found) -> None:
    """The best candidate as a configuration that a dry run of one rank has accepted.

    Raises:
        ConfigError: the dry run refuses it.
    """
    from titan_moe.dry_run import fake_run

    config = config_of(best.flags)
    config.job.description = f"{best.flags.model} on {best.flags.gpus} x {best.flags.system}"
    config.training.mixed_precision_param = "bfloat16"
    if "full" in best.flags.recompute:
        config.activation_checkpoint.mode = "full"
    elif best.flags.recompute:
        config.activation_checkpoint.mode = "targets"
        config.activation_checkpoint.targets = [
            "shared_expert" if target == "shared_experts" else target for target in best.flags.recompute
        ]
    if "optimizer" in best.flags.offload:
        config.optimizer.offload_fraction = 1.0
    if best.flags.moments == "bf16":
        config.optimizer.exp_avg_dtype = config.optimizer.exp_avg_sq_dtype = "bfloat16"
    # Packages of the machine that will train are not needed to check shapes.
    tried = config_of(best.flags)
    tried.training.mixed_precision_param = "bfloat16"
    tried.moe.dispatcher = "alltoall" if best.flags.ep > 1 else None
    fake_run(tried, 0, best.flags.gpus)
    wanted = [f"# predicted with: {layout_line(best.run)}", f"# {best.speed:.0f} tokens per s and GPU"]
    path.write_text("\n".join([*wanted, "", to_toml(config)]), encoding="utf-8")
