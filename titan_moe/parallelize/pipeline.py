"""Pipeline parallelism over the schedules of ``torch.distributed.pipelining``.

Between stages travels one tensor: the hidden states, those of the MTP depths behind the main ones along the batch dim.
Losses are sums times one weight, so no micro-batch is rescaled.

A parameter that several stages need, the embedding of MTP layers or of a tied head, has a copy on each of them. The
copies start equal, since weights are drawn by name; their gradients are summed after the backward passes, so they
stay equal.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard

from titan_moe.config.job import Parallelism
from titan_moe.errors import TrainingError
from titan_moe.models import Decoder, Losses, ModelConfig, token_losses
from titan_moe.models.base import tokens_ahead
from titan_moe.moe.balance import balances, finish_step, set_token_weight
from titan_moe.moe.dispatch.wire import all_gather
from titan_moe.parallelize.crossing import to_dtensor, to_local
from titan_moe.parallelize.layout import rank_of_stage
from titan_moe.parallelize.mesh import Meshes
from titan_moe.parallelize.stages import (
    ONE_STAGE,
    V_SHAPED,
    moe_layer_names,
    pipeline_stages,
    shared_parameters,
)

SCHEDULE_CLASSES = {
    "GPipe": schedules.ScheduleGPipe,
    "1F1B": schedules.Schedule1F1B,
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}

Batch = Mapping[str, Tensor]
# What a stage's forward takes besides its input, and what belongs to all sequences alike.
_FORWARD = ("document_ids", "valid", "positions", "mtp_input_ids")
_OF_ALL = ("positions",)
# What a report on MoE layers says of each layer besides its counts.
_SCALARS = ("routed_L", "dropped_L", "aux_loss_L", "z_loss_L", "bias_min_L", "bias_max_L")


class Pipeline:
    """The stages of this rank and the schedule that runs them.

    Attributes:
        modules: this rank's stages, in the order of the model.
    """

    def __init__(
        self,
        modules: Mapping[int, Decoder],
        parallelism: Parallelism,
        meshes: Meshes,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            modules: the stages of this rank, from ``split_model``, ready to compute. FSDP must not reshard after
                forward, and the stage itself must be an FSDP module, or what is in no block is never reduced.
            parallelism: the run's.
            meshes: of the world.
            device: where the modules are.
            dtype: of the hidden states between stages, the compute dtype.
        """
        self.by_index = dict(modules)
        self.modules = list(modules.values())
        self.model_config: ModelConfig = self.modules[0].config
        self.layout = pipeline_stages(parallelism, self.model_config)
        self.name = parallelism.pipeline_parallel_schedule
        self.microbatch_size = parallelism.pipeline_parallel_microbatch_size
        self.meshes, self.group = meshes, meshes.dense.get_group("pp")
        self.pp, self.rank = meshes.degrees.pp, dist.get_rank(self.group)
        self.device, self.dtype = device, dtype
        # Where the hidden states are DTensors: their mesh and placement.
        self.stream = None
        if meshes.degrees.tp > 1:
            self.stream = meshes.dense["tp"], Shard(1) if parallelism.enable_sequence_parallel else Replicate()
        v_shaped = self.name in V_SHAPED
        self.rank_of = [rank_of_stage(i, self.pp, v_shaped=v_shaped) for i in range(len(self.layout))]
        assert list(self.by_index) == [i for i, rank in enumerate(self.rank_of) if rank == self.rank]
        for index, module in self.by_index.items():
            names = [name for name, _, _ in balances(module)]
            assert names == moe_layer_names(self.model_config, self.layout[index]), names
        self.shared = shared_parameters(self.model_config, self.layout)
        self._schedule = None
        self._shape: torch.Size | None = None
        self._micro: list[Batch] = []
        self._weight = self._sums = torch.zeros(())

    @property
    def has_head(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank_of[-1] == self.rank

    @property
    def replicated_over_pp(self) -> dict[nn.Parameter, int]:
        """How many copies there are of each parameter that several stages hold; a norm counts them once."""
        return {p: len(holders) for name, holders in self.shared.items() for p in self._copies(name).values()}

    def _copies(self, name: str) -> dict[int, nn.Parameter]:
        """This rank's copies of a shared parameter, by stage."""
        return {i: self.by_index[i].get_parameter(name) for i in self.shared[name] if i in self.by_index}

    def train_step(self, batch: Batch, weight: Tensor, *, last: bool = True) -> Tensor:
        """Forward and backward of one batch; gradients are added to what is there.

        Args:
            batch: ``input_ids``, ``labels`` and where used ``document_ids``, ``[rows, S]``, the same on all ranks of
                the pp group, of the same shape in every call; and what else ``Decoder.forward`` and ``token_losses``
                take.
            weight: 0-d, what the loss of one token counts: loss scale / valid tokens of the global batch.
            last: whether it is the last batch of the optimizer step; gradients of shared parameters are then summed.

        Returns:
            float64 ``[main, MTP]`` losses summed over tokens, unweighted; 0 on ranks without the head.

        Raises:
            TrainingError: the batch has another shape than the first one.
        """
        self._micro, self._weight = self._micro_batches(batch), weight
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._build(batch["input_ids"].shape)
        for module in self.modules:
            set_token_weight(module, weight)
        # The target of a micro-batch is its number: the loss takes the labels from there.
        self._schedule.step(target=torch.arange(len(self._micro)), return_outputs=False)
        self._micro = []
        if last:
            self._sum_shared_gradients()
        return self._sums

    def _build(self, shape: torch.Size) -> None:
        """Make the schedule for batches of ``shape``: its buffers would take a smaller one without a word."""
        if self._shape is None:
            stages = [_Stage(self, index, len(self._micro[0]["input_ids"]), shape[1]) for index in self.by_index]
            self._schedule = SCHEDULE_CLASSES[self.name](
                stages[0] if self.name in ONE_STAGE else stages, len(self._micro), loss_fn=self._loss, scale_grads=False
            )
            self._shape = shape
        if shape != self._shape:
            raise TrainingError(
                f"a pipeline's batches must all have one shape, [sequences, tokens]: the first was "
                f"{list(self._shape)}, this one is {list(shape)}. Pad it or leave it out."
            )

    def _loss(self, outputs: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        losses = self._token_losses(outputs, self._micro[int(target)])
        self._sums += torch.stack([losses.main_sum.detach(), losses.mtp_sum.detach()])
        return losses.total * self._weight.to(losses.total.dtype)

    def _token_losses(self, outputs: Tensor | tuple[Tensor, ...], micro: Batch) -> Losses:
        return token_losses(
            outputs,
            micro["labels"],
            micro.get("document_ids"),
            self.model_config.mtp_loss_weight,
            micro.get("mtp_labels"),
        )

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """The batch in pieces of ``microbatch_size`` sequences, with the tokens that MTP layers look at."""
        batch, depths = dict(batch), self.model_config.mtp_depth
        if depths and "mtp_input_ids" not in batch:
            documents_BS, valid_BS = batch.get("document_ids"), batch.get("valid")
            batch["mtp_input_ids"] = tokens_ahead(batch["input_ids"], depths, documents_BS, valid_BS)
        rows = len(batch["input_ids"])
        return [
            {k: v if k in _OF_ALL or v is None else v[i : i + self.microbatch_size] for k, v in batch.items()}
            for i in range(0, rows, self.microbatch_size)
        ]

    def forward_stage(self, index: int, x: Tensor, micro: Batch) -> Tensor | tuple[Tensor, ...]:
        """Run one stage on what the stage before returned (ids for the first), local on both sides."""
        if index and self.stream is not None:
            mesh, placement = self.stream
            shape = (len(x), micro["input_ids"].shape[1], self.model_config.dim)
            x = to_dtensor(x, mesh, [placement], shape)
        out = self.by_index[index](x, **{name: micro[name] for name in _FORWARD if micro.get(name) is not None})
        if index + 1 == len(self.layout):
            return out
        if self.stream is not None:
            # The gradient that the next stage returns lies as its input does.
            placements = [self.stream[1]]
            out = to_local(out.redistribute(placements=placements), placements)
        return _Unview.apply(out) if out._is_view() else out

    def between(self, index: int, rows: int, seq_len: int, *, training: bool) -> Tensor:
        """A meta tensor like what enters stage ``index`` on this rank."""
        if index == 0:
            return torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
        if training:
            rows *= 1 + sum(len(stage.mtp) for stage in self.layout[:index])
        if self.stream is not None and isinstance(self.stream[1], Shard):
            mesh, _ = self.stream
            part = -(-seq_len // mesh.size())
            seq_len = min(max(seq_len - part * mesh.get_local_rank(), 0), part)
        shape = (rows, seq_len, self.model_config.dim)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=training)

    @torch.no_grad()
    def _sum_shared_gradients(self) -> None:
        """Give every copy of a shared parameter the sum of their gradients, in the same order everywhere."""
        for name, holders in self.shared.items():
            copies = self._copies(name)
            if not copies:
                continue
            grads, ops = {}, []
            for index, parameter in copies.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads[index] = to_local(parameter.grad, None)
            like = next(iter(grads.values()))
            for index in holders:
                owner = self.rank_of[index]
                if owner != self.rank:
                    grads[index] = torch.empty_like(like)
                    ops.append(dist.P2POp(dist.irecv, grads[index], group=self.group, group_peer=owner))
            others = sorted({self.rank_of[index] for index in holders} - {self.rank})
            for index in copies:
                sent = grads[index].contiguous()
                ops += [dist.P2POp(dist.isend, sent, group=self.group, group_peer=owner) for owner in others]
            _wait(ops)
            total = torch.stack([grads[index] for index in holders]).sum(0)
            for index in copies:
                grads[index].copy_(total)

    def micro_batch(self, number: int) -> Batch:
        """One micro-batch of the step that is running."""
        return self._micro[number]

    @torch.no_grad()
    def finish_step(self, *, update_bias: bool = True) -> dict[str, list[str] | Tensor]:
        """``titan_moe.moe.balance.finish_step`` for all stages: counts are summed over the ranks of each stage.

        Returns:
            its report for the MoE layers of the whole model, in the order of the model, on every rank.
        """
        reports = [finish_step(module, self._sum_over_stage, update_bias=update_bias) for module in self.modules]
        names_of = [moe_layer_names(self.model_config, stage) for stage in self.layout]
        per_rank = [
            [name for names, owner in zip(names_of, self.rank_of, strict=True) if owner == rank for name in names]
            for rank in range(self.pp)
        ]
        # Ranks hold different numbers of layers, but gather equally many rows.
        E, rows = self.model_config.moe.num_experts, max(map(len, per_rank))
        mine = torch.zeros(rows, E + len(_SCALARS), dtype=torch.float64, device=self.device)
        filled = 0
        for report in reports:
            count = len(report["names"])
            if count:
                scalars = [report[key].double()[:, None] for key in _SCALARS]
                mine[filled : filled + count] = torch.cat((report["counts_LE"].double(), *scalars), dim=1)
            filled += count
        everyones = all_gather(mine, rows, self.group)
        place = {name: rank * rows + row for rank, names in enumerate(per_rank) for row, name in enumerate(names)}
        ordered = [name for names in names_of for name in names]
        packed = everyones[[place[name] for name in ordered]]
        whole = {key: packed[:, E + i].to(reports[0][key].dtype) for i, key in enumerate(_SCALARS)}
        experts = torch.full((len(ordered),), E, dtype=torch.int64)
        return {"names": ordered, "counts_LE": packed[:, :E].long(), "num_experts_L": experts, **whole}

    def _sum_over_stage(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.meshes.stage.get_group())
        return x

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The main loss of a batch summed over tokens, float64; 0 on ranks without the head. Any shape will do.

        The schedules' own evaluation fails where the pipeline is folded, so this is a loop of its own: in every tick
        each rank runs at most one micro-batch through one stage, then all hand over what they made.
        """
        micro = self._micro_batches(batch)
        training = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        inputs = {(0, m): piece["input_ids"] for m, piece in enumerate(micro)}
        for tick in forward_ticks(self.rank_of, len(micro)):
            ops = []
            for index, m in tick:
                following = index + 1
                source, last = self.rank_of[index], following == len(self.layout)
                target = None if last else self.rank_of[following]
                out = None
                if source == self.rank:
                    out = self.forward_stage(index, inputs.pop((index, m)), micro[m])
                    if last:
                        total += self._token_losses(out, micro[m]).main_sum
                    elif target != source:
                        ops.append(dist.P2POp(dist.isend, out.contiguous(), group=self.group, group_peer=target))
                elif target == self.rank:
                    rows, seq_len = micro[m]["input_ids"].shape
                    out = torch.empty_like(self.between(following, rows, seq_len, training=False), device=self.device)
                    ops.append(dist.P2POp(dist.irecv, out, group=self.group, group_peer=source))
                if target == self.rank:
                    inputs[following, m] = out
            _wait(ops)
        for module, mode in zip(self.modules, training, strict=True):
            module.train(mode)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        return total


class _Unview(torch.autograd.Function):
    """The same memory as a tensor that is no view: schedules that split the backward pass detach it in place."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _Stage(PipelineStage):
    """A stage that takes its micro-batches from the pipeline, and passes only local tensors on."""

    def __init__(self, pipeline: Pipeline, index: int, rows: int, seq_len: int) -> None:
        # What leaves the last stage goes to the loss; only its number matters.
        logits = (torch.empty((), device="meta"),) * (1 + pipeline.model_config.mtp_depth)
        last = index + 1 == len(pipeline.layout)
        super().__init__(
            pipeline.by_index[index],
            index,
            len(pipeline.layout),
            pipeline.device,
            input_args=pipeline.between(index, rows, seq_len, training=True),
            output_args=logits if last else pipeline.between(index + 1, rows, seq_len, training=True),
            group=pipeline.group,
        )
        self.pipeline = pipeline

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        micro = self.pipeline.micro_batch(fwd_chunk_id)
        args = (micro["input_ids"],) if self.is_first else ()
        return super().forward_one_chunk(fwd_chunk_id, args, {"micro": micro}, save_forward_output)

    def forward_maybe_with_nosync(self, *args, **kwargs):
        return self.pipeline.forward_stage(self.stage_index, args[0], kwargs["micro"])


def forward_ticks(rank_of: list[int], count: int) -> list[list[tuple[int, int]]]:
    """An order for forward passes only: ticks of ``(stage, micro-batch)``, at most one per rank, inputs made before.

    Args:
        rank_of: the rank of each stage.
        count: micro-batches.
    """
    done = [0] * len(rank_of)
    ticks = []
    while done[-1] < count:
        tick: dict[int, int] = {}
        for stage, rank in enumerate(rank_of):
            ready = count if stage == 0 else done[stage - 1]
            if done[stage] < ready:
                # A later stage first: it is nearer to the end.
                tick[rank] = stage
        ticks.append([(stage, done[stage]) for stage in sorted(tick.values())])
        for stage in tick.values():
            done[stage] += 1
    return ticks


def _wait(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
