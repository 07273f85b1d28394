"""Predicted beside measured, once in a run: the check that a user gets of every plan."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn

from titan_moe.config import JobConfig
from titan_moe.models.count import Shape
from titan_moe.moe import MoE
from titan_moe.observe.memory import TensorTracker, total_bytes
from titan_moe.planner.command import own_options
from titan_moe.planner.memory import kept_bytes
from titan_moe.planner.predict import predict
from titan_moe.planner.rows import held_rows
from titan_moe.planner.run import Options, Run, plan_of
from titan_moe.planner.systems import System, system_of

STEP = 10
"""The step that is measured; those before it warm up."""
_SINCE = 5
_DEVICES = ("GB300", "GB200", "B200", "H200", "H100", "A100")


class Foresight:
    """Measures step ``STEP`` and says what the planner made of it.

    Args:
        config: the run's.
        world: its processes.
        device: where this process trains.
    """

    def __init__(self, config: JobConfig, world: int, device: torch.device) -> None:
        self.config, self.world, self.device = config, world, device
        # Copies on a CPU's second arena cannot be told from what stays, nor what a compiled layer keeps by its parts.
        plain = not config.activation_offload.targets and "offload" not in config.plugins.use
        plain = plain and not config.compile.enable and config.parallelism.pipeline_parallel_degree == 1
        self.counts = plain and device.type == "cpu"
        self.saved: int | None = None
        self.rows: list[int] = []
        self.since: tuple[int, float] | None = None

    @contextmanager
    def first_micro_batch(self, step: int, model: nn.Module) -> Iterator[None]:
        """Measures what is held when the forward pass within the block is done, if it is the step's turn.

        On a CPU, without a pipeline, offload or compilation.
        """
        if step != STEP or not self.counts:
            yield
            return
        rows: dict[nn.Module, int] = {}

        def count(experts: nn.Module, inputs: tuple) -> None:
            # Of a layer that runs again the second time changes nothing.
            rows[experts] = inputs[2].numel()

        def forward_done(*_: object) -> None:
            self.saved = total_bytes(tracker.alive())

        tracker = TensorTracker(model)
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, MoE):
                    stack.callback(module.experts.register_forward_pre_hook(count).remove)
            stack.callback(model.register_forward_hook(forward_done).remove)
            stack.enter_context(tracker)
            yield
        self.rows = list(rows.values())

    def after(self, step: int, tokens: int) -> str | None:
        """The line to print after ``STEP``, with the tokens trained on so far; None at other steps."""
        if step == _SINCE:
            self.since = tokens, time.perf_counter()
        if step != STEP or self.since is None:
            return None
        speed = (tokens - self.since[0]) / (time.perf_counter() - self.since[1])
        system = self._system()
        known = system or system_of("h100")
        options = own_options(self.config, Options(device=self.device.type))
        shape, run = plan_of(self.config, self.world, options, known)
        if self.device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(self.device) / 2**30
            result = predict(shape, run, known)
            memory = f"memory {result['ranks'][0]['total']:.2f} GiB, measured {measured:.2f}"
        elif self.saved is None:
            return None
        else:
            run, routing = self._as_routed(shape, run)
            predicted = kept_bytes(shape, run, run.stages[0])
            memory = (
                f"saved activations{routing} {predicted / 2**20:.2f} MiB, measured {self.saved / 2**20:.2f} "
                f"({predicted / self.saved - 1:+.1%})"
            )
        if system is None:
            return f"predicted {memory}; {speed:,.0f} tokens/s (no speed is predicted for this device)"
        rate = predict(shape, run, system)["tokens_per_s_per_gpu"] * self.world
        return f"predicted {memory}; {rate:,.0f} tokens/s, measured {speed:,.0f}"

    def _as_routed(self, shape: Shape, run: Run) -> tuple[Run, str]:
        """The run with the rows that this rank's experts had, which no plan can know, and words that say so."""
        even = held_rows(shape, run)
        # With a bound there is as much room whatever comes.
        if run.recv_capacity_factor or not self.rows or all(rows == even for rows in self.rows):
            return run, ""
        share = sum(self.rows) / len(self.rows) / even
        return replace(run, imbalance=share), f" (with this rank's experts at {share:.0%} of even routing, as measured)"

    def _system(self) -> System | None:
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((system_of(part.lower()) for part in _DEVICES if part in name), None)
