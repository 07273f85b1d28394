"""``titan-moe memory``: two training steps of a configuration in one process, and which tensors stood at the peak.

The steps run on fake tensors, which have shapes but no memory, so any model that one device would hold can be looked
at anywhere; routing takes the same shapes whatever it decides. With ``--real`` they run on the CPU. One rank of a
layout is a dry run of its micro-batch instead, with each option apart.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.config import JobConfig
from titan_moe.config.job import ActivationCheckpoint, ActivationOffload, Parallelism
from titan_moe.config.validate import resolved_dtypes, validate
from titan_moe.dry_run import FakeReport, fake_run
from titan_moe.errors import ConfigError
from titan_moe.models import init_parameters
from titan_moe.observe.flops import flops_per_token
from titan_moe.observe.memory import Held, TensorTracker, total_bytes
from titan_moe.optim import build_optimizer
from titan_moe.parallelize import Whole, build_model, check_run
from titan_moe.planner.command import own_options
from titan_moe.planner.memory import kept_bytes
from titan_moe.planner.run import Options, plan_of
from titan_moe.planner.systems import system_of
from titan_moe.plugins import Application, PluginContext, chosen
from titan_moe.plugins.offload import OFFLOAD, copies_for, offload_activations
from titan_moe.plugins.offloader import Offloader
from titan_moe.plugins.recompute import model_on_meta, recompute_targets
from titan_moe.plugins.savings import savings
from titan_moe.plugins.targets import RECOMPUTE, find

_CPU = torch.device("cpu")
_MIB = 2**20
_DEGREES = {
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
}


@dataclass(frozen=True)
class TargetReport:
    """What one target of recompute would change in a micro-batch, bytes and floating-point operations."""

    target: str
    predicted: int
    """Bytes not kept, as ``titan-moe plan`` has it."""
    measured: int
    flops: int
    """Of the products that run again."""


@dataclass(frozen=True)
class MemoryReport:
    """What ``measure`` found; bytes."""

    tokens: int
    """Of a micro-batch."""
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    """From the forward pass for the backward pass, as configured."""
    planned: int
    """The same as ``titan-moe plan`` predicts it."""
    peak: tuple[Held, ...]
    """What was alive at the peak of the second step, besides the three above."""
    recompute: tuple[TargetReport, ...]
    offload: dict[str, int]
    """Of each target of offload, what would wait on the host, without the last layer's."""
    step_flops: int
    """Of a micro-batch, forward and backward, without recompute."""


def measure(
    config: JobConfig, *, real: bool = False, on_part: Callable[[str], None] = lambda what: None
) -> MemoryReport:
    """Run two steps of ``config`` in this process, then the forward pass with each target of recompute and offload.

    Args:
        config: of a run that one process can do.
        real: on the CPU's memory instead of fake tensors.
        on_part: told what comes next.

    Raises:
        ConfigError: the configuration cannot run, or needs more than one process.
    """
    shared = [key for key, degree in asdict(config.parallelism).items() if key in _DEGREES and degree > 1]
    if shared:
        raise ConfigError(
            f"parallelism.{shared[0]} = {getattr(config.parallelism, shared[0])}: titan-moe memory looks at one "
            "process that holds the whole model. Leave it out, or look at a rank of the layout: "
            "NGPU=n RANK=r titan-moe memory."
        )
    validate(config)
    model_config, _, batch = check_run(config, 1)
    shape, run = plan_of(config, 1, own_options(config, Options(device="cpu")), system_of("h100"))
    # The batches here have no documents.
    run = replace(run, document_mask=False)

    def planned(recompute: list[str], offload: list[str]) -> float:
        return kept_bytes(shape, replace(run, recompute=recompute, offload=offload), run.stages[0])

    plugins = chosen(config)
    # Activations have the dtype of compute, and so do parameters as FSDP gathers them.
    dtype = getattr(torch, resolved_dtypes(config)[1])
    mode = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        ids = torch.zeros(batch.local, config.training.seq_len, dtype=torch.int64)
    # Where plugins believe the model to be: fake tensors have no bytes to move.
    device = _CPU if real else torch.device("meta")

    def configured(module: nn.Module) -> nn.Module:
        return Application(plugins, PluginContext(config=config, device=device)).apply(module)

    def runner_of(prepare: Callable[[nn.Module], nn.Module]) -> Whole:
        # Parameters come on meta: only what is made from there on is fake.
        runner = build_model(
            model_config, Parallelism(), None, device=torch.device("meta"), dtype=dtype, seed=None, prepare=prepare
        )
        with mode:
            runner.modules[0].to_empty(device=_CPU)
        if real:
            init_parameters(runner.modules[0], 0)
        return runner

    def forward(prepare: Callable[[nn.Module], nn.Module]) -> int:
        (model,) = runner_of(prepare).modules
        with mode, TensorTracker() as held:
            outputs = model(ids)
            kept = total_bytes(held.alive())
        del outputs
        return kept

    runner = runner_of(configured)
    (model,) = runner.modules
    tracker = TensorTracker()
    with mode:
        optimizer = build_optimizer(model, config.optimizer)
        weight = torch.ones((), dtype=torch.float64)
        # Gradients and moments are there from the first step on.
        for step in (1, 2):
            on_part(f"step {step}")
            with tracker if step == 2 else nullcontext():
                runner.train_step({"input_ids": ids, "labels": ids}, weight)
                optimizer.step()
    on_part("forward pass")
    plain = forward(lambda module: module)
    targets = []
    for target, saving in savings(model_config, ids.numel(), ids.shape[1], dtype.itemsize).items():
        on_part(f"recompute of {target}")
        measured = plain - forward(partial(_recomputed, target))
        predicted = round(planned([], []) - planned([target], []))
        targets.append(TargetReport(target, predicted, measured, saving.flops))
    away = {}
    for target in OFFLOAD:
        on_part(f"offload of {target}")
        offloader = Offloader(copies_for(device))
        forward(partial(_offloaded, target, offloader))
        away[target] = offloader.left - offloader.cancelled
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return MemoryReport(
        tokens=ids.numel(),
        parameters=_bytes(model.parameters()),
        gradients=_bytes(p.grad for p in model.parameters() if p.grad is not None),
        optimizer=_bytes(states),
        kept=forward(configured),
        planned=round(planned(run.recompute, run.offload)),
        peak=tuple(tracker.peak()),
        recompute=tuple(targets),
        offload=away,
        step_flops=flops_per_token(model_config, config.training.seq_len) * ids.numel(),
    )


@dataclass(frozen=True)
class RankReport:
    """What ``measure_rank`` found."""

    run: FakeReport
    """Of the configuration as it is."""
    plain: tuple[int, ...]
    """Bytes that a micro-batch keeps with neither recompute nor offload, by stage of the rank."""
    recompute: dict[str, tuple[int, ...]]
    """How many fewer with a target alone, by stage."""
    offload: dict[str, tuple[int, ...]]
    """The same: what is on the host when the forward pass ends, the last layer's apart where its backward is next."""


def measure_rank(
    config: JobConfig, rank: int, world: int, *, on_part: Callable[[str], None] = lambda what: None
) -> RankReport:
    """A dry run of one rank of a layout, then one with each target of recompute and offload that the model has.

    Raises:
        ConfigError: see ``fake_run``.
    """
    use = [name for name in config.plugins.use if name not in ("recompute", "offload")]
    none = {"activation_checkpoint": ActivationCheckpoint(), "activation_offload": ActivationOffload()}
    bare = replace(config, **none, plugins=replace(config.plugins, use=use))

    def kept(what: str, **option: object) -> tuple[int, ...]:
        on_part(what)
        return tuple(stage.saved_bytes for stage in fake_run(replace(bare, **option), rank, world).stages)

    def saved(what: str, **option: object) -> tuple[int, ...]:
        return tuple(all_ - some for all_, some in zip(plain, kept(what, **option), strict=True))

    on_part("the configuration")
    run, plain = fake_run(config, rank, world), kept("no option")
    model = model_on_meta(config)
    return RankReport(
        run,
        plain,
        recompute={
            target: saved(f"recompute of {target}", activation_checkpoint=ActivationCheckpoint("targets", [target]))
            for target in RECOMPUTE
            if find(model, [target], RECOMPUTE)
        },
        offload={
            target: saved(f"offload of {target}", activation_offload=ActivationOffload([target], min_bytes=0))
            for target in OFFLOAD
            if find(model, [target], OFFLOAD)
        },
    )


def show_rank(report: RankReport, console: Console, rows: int = 20) -> None:
    """Print ``report``: the rank, what its stages keep tensor by tensor, then what every option would save."""
    console.print(str(report.run), highlight=False)
    for stage in report.run.stages:
        console.print(_by_size(stage.kept, f"a micro-batch keeps in stage {stage.index}", rows))
    stages = [f"stage {stage.index}" for stage in report.run.stages]
    for title, by_target in (("recompute", report.recompute), ("offload", report.offload)):
        table = Table("target alone", *stages, title=f"MiB less with {title}")
        table.add_row("kept without any", *map(_mib, report.plain))
        for target, amounts in by_target.items():
            if any(amounts):
                table.add_row(target, *map(_mib, amounts))
        console.print(table)


def _recomputed(target: str, module: nn.Module) -> nn.Module:
    recompute_targets(module, [target])
    return module


def _offloaded(target: str, offloader: Offloader, module: nn.Module) -> nn.Module:
    if find(module, [target], OFFLOAD):
        offload_activations(module, [target], offloader)
    return module


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def show(report: MemoryReport, console: Console, rows: int = 40) -> None:
    """Print ``report``: the peak tensor by tensor, equal ones of different layers in one row, then every option."""
    peak = total_bytes(report.peak)
    static = report.parameters + report.gradients + report.optimizer
    console.print(
        f"{report.tokens:,} tokens. MiB: parameters {_mib(report.parameters)}, gradients {_mib(report.gradients)}, "
        f"optimizer {_mib(report.optimizer)}; kept between forward and backward {_mib(report.kept)}, "
        f"predicted {_mib(report.planned)}; at the peak "
        f"{_mib(peak)} of activations and temporaries, {_mib(static + peak)} in all."
    )
    console.print(_by_size(report.peak, "held at the peak", rows))
    table = Table("target", "MiB measured", "MiB predicted", "more FLOPs", title="recompute would not keep")
    for one in report.recompute:
        share = f"{one.flops / report.step_flops:.1%}"
        table.add_row(one.target, _mib(one.measured), _mib(one.predicted), share)
    console.print(table)
    table = Table("target", "MiB", title="offload would send to the host, the last layer's apart")
    for target, nbytes in report.offload.items():
        if nbytes:
            table.add_row(target, _mib(nbytes))
    console.print(table)


def _by_size(held: Iterable[Held], title: str, rows: int) -> Table:
    grouped: Counter[tuple] = Counter()
    for one in held:
        where = re.sub(r"\.\d+(?=\.|$)", ".*", one.module)
        grouped[where, one.operator, one.shape, str(one.dtype).removeprefix("torch."), one.nbytes] += 1
    ordered = sorted(grouped.items(), key=lambda item: -item[0][-1] * item[1])
    table = Table("MiB", "tensors", "shape", "dtype", "made in", "by", title=title)
    for (where, operator, shape, dtype, nbytes), count in ordered[:rows]:
        table.add_row(_mib(nbytes * count), str(count), str(list(shape)), dtype, where, operator)
    rest = sum(key[-1] * count for key, count in ordered[rows:])
    if rest:
        table.add_row(_mib(rest), str(sum(count for _, count in ordered[rows:])), "", "", "smaller ones", "")
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f}"
