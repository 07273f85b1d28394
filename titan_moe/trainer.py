"""The training loop.

One loss for every layout: the sum of token losses over the number of valid tokens of the *global* batch. So
every reduction is a sum, and accumulation, data parallelism and padding change nothing.
"""

import fcntl
import gc
import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from titan_moe import distributed as dist
from titan_moe.checkpoint import Checkpointer, load_weights, restore_rng, rng_tensors
from titan_moe.config import (
    JobConfig,
    left_out_of_loading,
    resolved_dtypes,
    resolved_seed,
    validate,
)
from titan_moe.data import build_loader, build_tokenizer
from titan_moe.errors import CheckpointError, ConfigError, TrainingError
from titan_moe.hf import attach_origin, export_dtype, load_hf_weights, save_hf
from titan_moe.hf.config import config_to_hf
from titan_moe.kernels.backend import set_backend
from titan_moe.models.loss import IGNORE
from titan_moe.moe.bound import unbounded
from titan_moe.observe import MetricsLogger, Profiler, flops_per_token
from titan_moe.optim import LossScaler, LRSchedule, build_optimizer, clip_grad_norm, set_lr
from titan_moe.parallelize import Pipeline, Whole, build_meshes, build_model, check_run, compile_layers, shard_sequence
from titan_moe.parallelize.signature import check_signature, signature_of_config, signature_of_parameters
from titan_moe.planner.foresight import Foresight
from titan_moe.plugins import Application, Plugin, PluginContext, chosen
from titan_moe.rerun import Rerun

_LONG_WAIT_SECONDS = 1.0


def train(config: JobConfig) -> None:
    """Run the training that ``config`` describes, from its newest checkpoint when there is one.

    Raises:
        ConfigError: the configuration cannot run; raised before any process group exists.
        DataError, CheckpointError, TrainingError: what went wrong later.
    """
    validate(config, dist.world_size())
    trainer = Trainer(config, chosen(config))
    try:
        trainer.run()
    finally:
        trainer.close()


class Trainer:
    """Everything one process holds for a run; :meth:`run` is the loop, :meth:`step` one optimizer step."""

    def __init__(self, config: JobConfig, plugins: list[Plugin]) -> None:
        self.config = config
        self.seed = resolved_seed(config)
        self.dtype, self.compute_dtype = resolved_dtypes(config)
        self.model_config, degrees, batch = check_run(config, dist.world_size())
        self.tokenizer = build_tokenizer(config.model.tokenizer)
        self._check_model()
        place, _ = degrees.coordinates(dist.rank())
        dp_size = degrees.dp_replicate * degrees.dp_shard
        dp_rank = place["dp_replicate"] * degrees.dp_shard + place["dp_shard"]
        self.accumulation, self.samples_per_step = batch.passes, batch.total
        # Of the ranks that see the same tokens, the first counts them, and one with the head reports their loss.
        self.counts_tokens = place["tp"] == 0 and place["pp"] == 0
        self.cp_rank, self.cp_size = place["cp"], degrees.cp
        self.lock = _lock(Path(config.job.dump_folder)) if dist.rank() == 0 else None
        self.device = torch.device("cuda", dist.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        set_backend(config.kernels.backend, self.device.type)
        if config.debug.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(self.seed + dist.rank())
        # Made before the process group, so that a long first tokenization cannot run into its timeout.
        data = {"dp_rank": dp_rank, "dp_size": dp_size}
        self.loader = build_loader(config, self.tokenizer, split="train", **data)
        self.val_loader = None
        if config.validation.enable:
            self.val_loader = build_loader(config, self.tokenizer, split="validation", **data)
        # A caller's own group is used and left as it is.
        self.owns_group = self._sharded() and not dist.is_distributed()
        if self.owns_group:
            dist.init_process_group(self.device.type, config.comm.init_timeout_seconds)

        self.foresight = Foresight(config, dist.world_size(), self.device)
        self.runner = self._build(plugins)
        self.reports_loss = place["tp"] == 0 and self.runner.has_head
        modules = self.runner.modules
        self.model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        bounded = self.model_config.moe.recv_capacity_factor is not None
        self.rerun = Rerun(self.model, self.optimizer, self.device, bounded)
        self.schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps)
        self.scaler = LossScaler(enabled=self.compute_dtype == "float16")
        self.checkpointer = None
        if config.checkpoint.enable:
            folder = Path(config.job.dump_folder) / config.checkpoint.folder
            mode = config.checkpoint.async_mode
            self.checkpointer = Checkpointer(
                folder,
                config.checkpoint.keep_latest_k,
                async_mode="process" if mode == "async_with_pinned_mem" else mode,
                timeout_seconds=config.checkpoint.timeout_seconds,
            )
        self.step_done = 0
        # Steps that the learning rate is ahead of the others, when only one of both was resumed.
        self.lr_ahead = 0
        self.warmed_up = False
        self.skipped_in_row = 0
        # Asked of this rank, and agreed by all: ranks may get a signal at different moments.
        self.stop_asked = self.stop_signal = 0
        self.save_failed = False
        self.tokens = 0
        self._load()
        self.logger = MetricsLogger(
            config,
            rank=dist.rank(),
            total_steps=config.training.steps,
            resume_step=self.step_done,
            start_tokens=self.tokens,
            flops_per_token=flops_per_token(self.model_config, config.training.seq_len),
            num_devices=dist.world_size(),
            device=self.device,
        )

    def _check_model(self) -> None:
        """What config and model do not agree on, while a refusal is still cheap."""
        if self.config.checkpoint.last_save_in_hf:
            # Refuses what transformers cannot express now, not after the last step.
            config_to_hf(self.model_config, {}, self.model_config.mtp_depth, getattr(torch, self.dtype))
        needed, has = self.tokenizer.vocab_size, self.model_config.vocab_size
        if needed > has:
            raise ConfigError(
                f"the model's vocab_size = {has} is smaller than the {needed} tokens of the tokenizer "
                f"{self.config.model.tokenizer!r}. Set model.override.vocab_size to at least {needed}."
            )

    def _sharded(self) -> bool:
        """Whether FSDP is needed: for several processes, or to compute in another dtype than the parameters'."""
        return dist.world_size() > 1 or self.compute_dtype != self.dtype

    def _build(self, plugins: list[Plugin]) -> Whole | Pipeline:
        config = self.config
        application = Application(plugins, PluginContext(config=config, device=self.device))

        def prepare(module: nn.Module) -> nn.Module:
            if config.compile.enable:
                compile_layers(module)
            return application.apply(module)

        meshes, timeout = None, config.comm.init_timeout_seconds
        if self._sharded():
            check_signature("configuration", signature_of_config(config), timeout_seconds=timeout)
            meshes = build_meshes(config.parallelism, self.device.type)
        runner = build_model(
            self.model_config,
            config.parallelism,
            meshes,
            device=self.device,
            dtype=getattr(torch, self.dtype),
            compute_dtype=getattr(torch, self.compute_dtype) if self.compute_dtype != self.dtype else None,
            seed=self.seed,
            prepare=prepare,
        )
        application.finish()
        if meshes is not None:
            parameters = [item for module in runner.modules for item in module.named_parameters()]
            stage = meshes.dense["pp"].get_local_rank()
            check_signature("model", signature_of_parameters(parameters), group=stage, timeout_seconds=timeout)
        return runner

    def _load(self) -> None:
        """Resume from the newest complete checkpoint, else start from ``initial_load_path``, else from scratch."""
        config = self.config.checkpoint
        if self.checkpointer is None:
            return
        anew, patterns = left_out_of_loading(self.config)
        optimizer = None if "optimizer" in anew else self.optimizer
        loaded = self.checkpointer.load(self.model, optimizer, config.load_step, exclude=patterns)
        if loaded is not None:
            extra = loaded.extra
            if "train_state" not in anew:
                self.step_done, self.tokens = loaded.step, extra["tokens"]
                self.scaler.load_state_dict(extra["scaler"])
            self.lr_ahead = (0 if "lr_scheduler" in anew else extra["lr_step"]) - self.step_done
            if "dataloader" not in anew:
                self.loader.load_state_dict(extra["loader"])
            if "rng" not in anew:
                restore_rng(loaded.rank_tensors)
            if config.initial_load_in_hf and config.last_save_in_hf:
                attach_origin(self.runner.modules, config.initial_load_path)
        elif config.initial_load_path and config.initial_load_in_hf:
            load_hf_weights(self.runner.modules, config.initial_load_path)
        elif config.initial_load_path:
            load_weights(self.model, config.initial_load_path)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, or begin to, once the one before is written.

        Raises:
            CheckpointError: one of them could not be written, and ``checkpoint.strict``.
        """
        self.settle()
        try:
            self.checkpointer.save(
                self.step_done,
                self.model,
                self.optimizer,
                extra={
                    "tokens": self.tokens,
                    "lr_step": self.step_done + self.lr_ahead,
                    "loader": self.loader.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "config": asdict(self.config),
                },
                rank_tensors=rng_tensors(),
            )
        except CheckpointError as error:
            self._lost(error)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises as ``save`` does."""
        start = time.perf_counter()
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            self._lost(error)
        waited = time.perf_counter() - start
        if waited > _LONG_WAIT_SECONDS:
            self.logger.message(f"waited {waited:.1f} s until a checkpoint was written")

    def _lost(self, error: CheckpointError) -> None:
        newest = self.checkpointer.latest()
        kept = "there is no complete checkpoint" if newest is None else f"the newest complete one is step {newest}"
        if self.config.checkpoint.strict:
            raise CheckpointError(f"{error}; {kept}") from error
        self.logger.message(f"{error}; {kept}; training goes on")

    def run(self) -> None:
        """Train until ``training.steps``, a signal or an error."""
        config, logger = self.config, self.logger
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        gc.disable()
        try:
            with logger, Profiler(config, rank=dist.rank(), resume_step=self.step_done) as profiler:
                self._announce()
                batches = iter(self.loader) if self.step_done < config.training.steps else None
                while self.step_done < config.training.steps and not self.stop_signal:
                    self.step(batches)
                    profiler.step()
                    with logger.untimed():
                        self._after_step()
                self._finish()
        finally:
            gc.enable()
            self.loader.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _after_step(self) -> None:
        config, step = self.config, self.step_done
        if (line := self.foresight.after(step, self.tokens)) is not None:
            self.logger.message(line)
        last = step == config.training.steps
        saving = config.checkpoint
        if self.save_failed or (saving.max_steps_ahead and step % saving.interval == saving.max_steps_ahead):
            self.settle()
        if step % config.training.gc_freq == 0:
            gc.collect(1)
        if self.val_loader is not None and (last or step % config.validation.freq == 0):
            self.evaluate()
        if self.checkpointer is not None and (last or self.stop_signal or step % config.checkpoint.interval == 0):
            self.save()

    def _finish(self) -> None:
        folder = self.config.job.dump_folder
        if self.checkpointer is not None:
            self.settle()
        if self.stop_signal:
            saved = "its checkpoint is saved" if self.checkpointer else "checkpoint.enable is off, so nothing is saved"
            name = signal.Signals(self.stop_signal).name
            self.logger.message(f"stopped by {name} after step {self.step_done}; {saved}")
            return
        if self.config.checkpoint.last_save_in_hf:
            save_hf(self.runner.modules, Path(folder) / "hf", export_dtype(self.config.checkpoint.export_dtype))
            if dist.rank() == 0:
                self.tokenizer.save(Path(folder) / "hf")
        self.logger.message(f"done: {self.step_done} steps; metrics, config and checkpoints are in {folder}")

    def _on_signal(self, number: int, frame) -> None:
        self.stop_asked = number

    def _announce(self) -> None:
        config, data = self.config, self.loader
        if config.job.description:
            self.logger.message(config.job.description)
        total = sum(p.numel() for p in self.model.parameters())
        whose = " of this pipeline stage" if config.parallelism.pipeline_parallel_degree > 1 else ""
        self.logger.message(
            f"{config.model.name}_{config.model.flavor}: {total:,} parameters{whose} in {self.dtype}, compute in "
            f"{self.compute_dtype}, {dist.world_size()} x {self.device.type}"
        )
        self.logger.message(
            f"{config.training.dataset}: {data.num_documents:,} documents, {data.num_tokens:,} tokens, "
            f"{data.sequences_per_epoch:,} sequences of {config.training.seq_len} an epoch"
        )
        self.logger.explain_memory()
        if self.step_done:
            self.logger.message(f"resumed after step {self.step_done}")

    def step(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """One optimizer step over the global batch."""
        start = time.perf_counter()
        micro = [self._local(next(batches)) for _ in range(self.accumulation)]
        data_wait = time.perf_counter() - start
        valid = torch.stack([(b["labels"] != IGNORE).sum() for b in micro]).sum()
        n_valid = dist.all_reduce_sum(valid * self.counts_tokens)
        # Auxiliary losses carry the same factor as the main loss.
        weight = self.scaler.scale / n_valid.clamp(min=1).double()
        self.rerun.begin()
        overflow, own_loss, *numbers = self._passes(micro, n_valid, weight)
        if overflow:
            self.logger.message(f"step {self.step_done + 1} passed moe.recv_capacity_factor and runs again without it")
            with self.rerun.without_bound():
                _, own_loss, *numbers = self._passes(micro, n_valid, weight)
        main_sum, mtp_sum, stop, save_failed, norm, tokens = numbers
        loss, mtp_loss = main_sum / max(tokens, 1), mtp_sum / max(tokens, 1)
        self.save_failed = bool(save_failed)
        if stop:
            self.stop_signal = self.stop_asked or signal.SIGTERM

        self.tokens += self.samples_per_step * self.config.training.seq_len
        lr, scale = self.schedule.lr_at(self.step_done + 1 + self.lr_ahead), self.scaler.scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.skipped_in_row = 0
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        elif not self.scaler.enabled or not math.isfinite(loss):
            self._skip_or_raise(loss, norm, own_loss)
        self.scaler.update(finite)
        self.optimizer.zero_grad()
        moe = self.runner.finish_step(update_bias=finite)
        self.step_done += 1
        if not self.warmed_up:
            self.warmed_up = True
            dist.set_timeout(self.config.comm.train_timeout_seconds)

        metrics = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens": self.tokens, "data_wait_s": data_wait}
        if self.model_config.mtp_depth:
            metrics["mtp_loss"] = mtp_loss / self.model_config.mtp_depth
        if not finite:
            metrics["skipped"] = self.skipped_in_row
        self.logger.log_step(self.step_done, metrics, self._moe_metrics(moe, scale))

    def _passes(self, micro: list[dict[str, Tensor]], n_valid: Tensor, weight: Tensor) -> tuple:
        """Forward and backward passes of a step.

        Returns:
            how many ranks passed the bound on received rows; this rank's own loss, on the device; and over all ranks
            the main and the MTP loss, how many are asked to stop, how many failed to write a checkpoint, the
            gradient's norm, valid tokens.
        """
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        for i, batch in enumerate(micro):
            with self.foresight.first_micro_batch(self.step_done + 1 if i == 0 else 0, self.model):
                sums[:2] += self.runner.train_step(batch, weight, last=i == len(micro) - 1)
        self.scaler.unscale(self.model.parameters())
        grad_norm = clip_grad_norm(
            self.model.parameters(),
            self.config.training.max_norm,
            pp=self.config.parallelism.pipeline_parallel_degree,
            copies=self.runner.replicated_over_pp,
        )
        own_loss = sums[0].clone()
        sums *= self.reports_loss
        sums[2] = float(self.stop_asked)
        sums[3] = float(self.checkpointer is not None and self.checkpointer.failed)
        sums[4] = self.rerun.overflow()
        # The one place where the host waits for the device.
        *numbers, overflow, norm, tokens = torch.stack(
            [*dist.all_reduce_sum(sums), grad_norm.double(), n_valid.double()]
        ).tolist()
        return overflow, own_loss, *numbers, norm, tokens

    def _local(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch on the device, and of its sequences the part that is this rank's."""
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        if not self.config.training.document_mask:
            # One document, for which attention needs no mask of its own.
            del batch["document_ids"]
        return shard_sequence(batch, self.cp_rank, self.cp_size, mtp_depth=self.model_config.mtp_depth)

    def _moe_metrics(self, moe: dict, scale: float) -> dict | None:
        if not moe["names"] or not self.logger.active:
            return None
        return moe | {"aux_loss_L": moe["aux_loss_L"] / scale, "z_loss_L": moe["z_loss_L"] / scale}

    def _skip_or_raise(self, loss: float, norm: float, own_loss: Tensor) -> None:
        """Count a step that cannot be applied.

        Raises:
            TrainingError: there were more in a row than ``training.skip_nonfinite``.
        """
        self.skipped_in_row += 1
        if self.skipped_in_row <= self.config.training.skip_nonfinite:
            return
        bad = [str(rank) for rank, good in enumerate(dist.gather_objects(math.isfinite(own_loss))) if not good]
        where = f"the loss of rank {', '.join(bad)}" if bad else "the gradients alone"
        newest = self.checkpointer.latest() if self.checkpointer else None
        good = "there is no checkpoint" if newest is None else f"the last good checkpoint is step {newest}"
        raise TrainingError(
            f"step {self.step_done + 1}: loss = {loss}, grad_norm = {norm}: not finite, from {where}; {good}. "
            "Lower optimizer.lr, or set training.skip_nonfinite to skip such steps."
        )

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the validation batches, the same ones every time."""
        bytes_V = self.tokenizer.token_bytes().to(self.device)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with unbounded(self.rerun.dispatchers):
            for batch in map(self._local, self.val_loader):
                labels = batch["labels"]
                valid = labels != IGNORE
                counts = torch.stack([valid.sum(), (bytes_V[labels.clamp(min=0)] * valid).sum()])
                sums[0] += self.runner.evaluate(batch) * self.reports_loss
                sums[1:] += counts * self.counts_tokens
        loss, tokens, n_bytes = dist.all_reduce_sum(sums).tolist()
        self.logger.log_validation(
            self.step_done,
            {
                "val_loss": loss / tokens if tokens else math.nan,
                "val_loss_per_byte": loss / n_bytes if n_bytes else math.nan,
                "val_tokens": int(tokens),
            },
        )

    def close(self) -> None:
        """Finish the checkpoint that is being written, and leave the process group that this trainer made."""
        if self.checkpointer is not None:
            try:
                self.checkpointer.close()
            except CheckpointError as error:
                # What ended the run comes first; this only comes on top.
                logging.getLogger(__name__).warning("%s", error)
        if self.owns_group:
            dist.destroy()
        if self.lock is not None:
            self.lock.close()


def _lock(folder: Path) -> IO[str]:
    """Hold ``folder`` for this run until the file is closed, as the system does for a process that dies.

    Raises:
        ConfigError: another run holds it; the two would delete each other's checkpoints.
    """
    file = open(folder / ".lock", "a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"job.dump_folder = {str(folder)!r} is in use by another run. Wait for it, or choose another folder."
        ) from None
    return file
