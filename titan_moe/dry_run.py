"""One rank of a large run, here and alone: its meshes, its shards, the shapes of one step, and what they weigh.

``COMM_MODE=fake_backend NGPU=1024 RANK=17 ./run_train.sh …``: a process group whose collectives do nothing, parameters
on meta until they are sharded, then fake tensors that have shapes but no memory. So a layout is tried on the real
model and the real code before a single device is booked. Routing is taken as even.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, debug

from titan_moe.config import JobConfig, resolve_batch, resolved_dtypes
from titan_moe.config.degrees import Degrees, reshard_after_forward
from titan_moe.distributed import is_distributed
from titan_moe.errors import ConfigError
from titan_moe.models import Decoder, ModelConfig, from_config, token_losses
from titan_moe.moe import MoE
from titan_moe.moe.balance import set_token_weight
from titan_moe.moe.dispatch.alltoall import AllToAllDispatcher
from titan_moe.moe.dispatch.base import GroupDispatcher
from titan_moe.observe.memory import Held, TensorTracker, total_bytes
from titan_moe.optim import OptimizerBytes, choose, optimizer_bytes
from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.check import check_run
from titan_moe.parallelize.layout import Stage
from titan_moe.parallelize.mesh import Meshes, build_meshes
from titan_moe.parallelize.pipeline import Pipeline
from titan_moe.parallelize.split import split_model
from titan_moe.plugins import Application, PluginContext, chosen

_DATA_AXES = ("dp_replicate", "fsdp", "edp_replicate", "edp_shard")


@dataclass(frozen=True)
class StageReport:
    """One pipeline stage of the rank; bytes are this rank's."""

    index: int
    parts: str
    """What the stage holds, in the letters of a layout."""
    parameters: int
    """Elements of the whole stage, over all its ranks."""
    local_parameters: int
    """Elements that this rank keeps."""
    shard_bytes: int
    """The same in bytes."""
    gathered_bytes: int
    """All parameters of the stage as gathered for compute."""
    output: str
    """Shape and dtype of what leaves the stage."""
    kept: tuple[Held, ...]
    """What one micro-batch keeps for its backward pass, tensor by tensor."""

    @property
    def saved_bytes(self) -> int:
        """Of all that a micro-batch keeps."""
        return total_bytes(self.kept)


@dataclass(frozen=True)
class FakeReport:
    """What ``fake_run`` found."""

    rank: int
    degrees: Degrees
    stages: tuple[StageReport, ...]
    optimizer: OptimizerBytes
    model_parameters: int
    """Elements of the whole model, its shared ones once."""
    micro_batches: int
    """Per step and data-parallel rank."""
    keeps_gathered: bool
    """Whether gathered parameters stay until the step's end."""
    seconds: float

    @property
    def local_parameters(self) -> int:
        """Elements that this rank keeps, over all its stages."""
        return sum(stage.local_parameters for stage in self.stages)

    def __str__(self) -> str:
        dense, expert = (_axes(place) for place in self.degrees.coordinates(self.rank))
        shards = sum(stage.shard_bytes for stage in self.stages)
        gathered = sum(stage.gathered_bytes for stage in self.stages)
        host = f", {_gib(self.optimizer.host_state)} on the host" if self.optimizer.host_state else ""
        lines = [
            f"rank {self.rank} of {self.degrees.world}, a dry run",
            f"  dense   {_axes(self.degrees.dense)}; here {dense}",
            f"  expert  {_axes(self.degrees.expert)}; here {expert}",
            f"  model   {self.model_parameters:,} parameters; here {self.local_parameters:,}",
            f"  memory  {_gib(shards)} parameters, {_gib(self.optimizer.gradients)} gradients, "
            f"{_gib(self.optimizer.state)} optimizer{host}; "
            f"{_gib(gathered)} gathered, {'kept' if self.keeps_gathered else 'block by block'}",
            f"  step    {self.micro_batches} micro-batches",
        ]
        lines += [
            f"  stage {stage.index:3d}  {stage.parts}: {stage.parameters:,} parameters, "
            f"here {stage.local_parameters:,}; gathered {_gib(stage.gathered_bytes)}; "
            f"a micro-batch keeps {_gib(stage.saved_bytes)}; out {stage.output}"
            for stage in self.stages
        ]
        return "\n".join([*lines, f"  took    {self.seconds:.1f} s"])


def fake_run(config: JobConfig, rank: int, world: int) -> FakeReport:
    """Run ``config`` as ``rank`` of ``world`` processes, up to the shapes of one step.

    Raises:
        ConfigError: the configuration cannot run, or the rank is not one of the world.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"RANK = {rank}: with NGPU = {world} processes ranks are 0 to {world - 1}.")
    start = perf_counter()
    model_config, degrees, batch = check_run(config, world)
    with torch.device("meta"):
        whole = from_config(model_config)
    # Whether every rule matches something; a rank of a pipeline has only some of the names.
    choose(whole, config.optimizer)
    with _fake_world(rank, world):
        meshes = build_meshes(config.parallelism)
        stages, optimizer = _stages(config, model_config, meshes)
    per_pass = batch.local // config.parallelism.pipeline_parallel_microbatch_size if degrees.pp > 1 else 1
    return FakeReport(
        rank=rank,
        degrees=degrees,
        stages=stages,
        optimizer=optimizer,
        model_parameters=sum(parameter.numel() for parameter in whole.parameters()),
        micro_batches=per_pass * batch.passes,
        keeps_gathered=not reshard_after_forward(config.parallelism),
        seconds=perf_counter() - start,
    )


@contextmanager
def _fake_world(rank: int, world: int) -> Iterator[None]:
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not is_distributed(), "a dry run makes a world of its own"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # What DTensor remembers of an operator holds the mesh, and so groups that are gone.
        debug._clear_sharding_prop_cache()


def _stages(
    config: JobConfig, model_config: ModelConfig, meshes: Meshes
) -> tuple[tuple[StageReport, ...], OptimizerBytes]:
    parallelism, degrees = config.parallelism, meshes.degrees
    dtype, compute_dtype = (getattr(torch, name) for name in resolved_dtypes(config))
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        modules = split_model(model_config, parallelism, meshes.dense.get_local_rank("pp"))
    finally:
        torch.set_default_dtype(default)
    plugins = Application(chosen(config), PluginContext(config, torch.device("meta")))
    for module in modules.values():
        plugins.apply(module)
        parallelize(
            module,
            meshes,
            sequence_parallel=parallelism.enable_sequence_parallel,
            cp_method=parallelism.context_parallel_method,
            compute_dtype=compute_dtype if compute_dtype != dtype else None,
            reshard_after_forward=reshard_after_forward(parallelism),
        )
        _even_dispatch(module)
    optimizer = optimizer_bytes(nn.ModuleList(modules.values()), config.optimizer)
    rows = resolve_batch(config, degrees.dp_replicate * degrees.dp_shard).local
    if degrees.pp > 1:
        rows = parallelism.pipeline_parallel_microbatch_size
    device = torch.device("cpu")
    pipeline = Pipeline(modules, parallelism, meshes, device=device, dtype=compute_dtype)
    reports = []
    # FSDP shards on meta; only then does storage come, and it is fake.
    with FakeTensorMode(allow_non_fake_inputs=True):
        micro = _micro_batch(model_config, rows, config.training.seq_len, degrees.cp)
        for index, module in modules.items():
            module.to_empty(device=device).train()
            set_token_weight(module, torch.empty(()))
            entering = pipeline.between(index, *micro["input_ids"].shape, training=True)
            entering = torch.empty(entering.shape, dtype=entering.dtype, requires_grad=entering.requires_grad)
            output, kept = _forward_backward(pipeline, index, entering if index else micro["input_ids"], micro)
            reports.append(_report(index, pipeline.layout[index], module, compute_dtype, output, kept))
    return tuple(reports), optimizer


def _micro_batch(model_config: ModelConfig, rows: int, seq_len: int, cp: int) -> dict[str, Tensor]:
    """The tensors of one micro-batch on this rank, without values."""
    local = seq_len // cp
    micro = {name: torch.empty(rows, local, dtype=torch.int64) for name in ("input_ids", "labels")}
    if cp > 1:
        micro["positions"] = torch.empty(local, dtype=torch.int64)
    if model_config.mtp_depth:
        for name in ("mtp_input_ids", "mtp_labels"):
            micro[name] = torch.empty(rows, model_config.mtp_depth, local, dtype=torch.int64)
    return micro


def _forward_backward(
    pipeline: Pipeline, index: int, entering: Tensor, micro: Mapping[str, Tensor]
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Held, ...]]:
    """One micro-batch through one stage and back: what left it, and what was kept for the way back."""
    with TensorTracker(pipeline.by_index[index]) as tracker:
        output = pipeline.forward_stage(index, entering, micro)
        if index + 1 == len(pipeline.layout):
            weight = pipeline.model_config.mtp_loss_weight
            total = token_losses(output, micro["labels"], None, weight, micro.get("mtp_labels")).total
        else:
            total = output
        kept = tuple(tracker.alive())
    total.backward(torch.empty_like(total))
    return output, kept


def _report(
    index: int,
    stage: Stage,
    module: Decoder,
    compute_dtype: torch.dtype,
    output: Tensor | tuple[Tensor, ...],
    kept: tuple[Held, ...],
) -> StageReport:
    first = output[0] if isinstance(output, tuple) else output
    parameters = list(module.parameters())
    locals_ = [_local(parameter) for parameter in parameters]
    parts = "E" * stage.embedding + "t" * len(stage.layers) + "m" * len(stage.mtp) + "L" * stage.head
    return StageReport(
        index=index,
        parts=parts,
        parameters=sum(parameter.numel() for parameter in parameters),
        local_parameters=sum(tensor.numel() for tensor in locals_),
        shard_bytes=sum(tensor.numel() * tensor.element_size() for tensor in locals_),
        gathered_bytes=sum(_gathered(parameter) for parameter in parameters) * compute_dtype.itemsize,
        output=f"{list(_local(first).shape)} {str(first.dtype).removeprefix('torch.')}",
        kept=kept,
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gathered(parameter: Tensor) -> int:
    """Elements of what FSDP gathers: cut by the axes of the model only."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate(), parameter.placements, strict=True)
        for name, count, at, placement in axes:
            if name not in _DATA_AXES and placement.is_shard():
                piece = -(-sizes[placement.dim] // count)
                sizes[placement.dim] = max(0, min(piece, sizes[placement.dim] - at * piece))
    return prod(sizes)


class _EvenDispatcher(AllToAllDispatcher):
    """Sizes of even routing, since those of a fake tensor are unknown."""

    host_syncs = 0

    def read_sizes(self, rows_p: Tensor, counts_Ge: Tensor) -> tuple[list[int], list[int]]:
        share, rest = divmod(self.rows, self.ep_size)
        to_ep = [share + (p < rest) for p in range(self.ep_size)]
        mine = to_ep[dist.get_rank(self.group) // self.etp_size]
        return to_ep, [mine] * (self.ep_size * self.etp_size)

    def dispatch_preprocess(self, x_TD, routing):
        self.rows = routing.expert_ids_TK.numel()
        return super().dispatch_preprocess(x_TD, routing)


def _even_dispatch(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, MoE) and isinstance(layer.dispatcher, GroupDispatcher) and layer.dispatcher.host_syncs:
            old = layer.dispatcher
            layer.dispatcher = _EvenDispatcher(old.num_experts, old.group, old.etp_size)


def _axes(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
