"""Predicted beside measured, once in a run: the check that a user gets of every plan."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.config import JobConfig
from titan_moe.planner.command import own_options
from titan_moe.planner.memory import kept_bytes
from titan_moe.planner.predict import predict
from titan_moe.planner.run import Options, plan_of
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
        # What is recomputed or moved to the host never passes the hooks that count.
        plain = config.activation_checkpoint.mode == "none" and not config.activation_offload.targets
        plain = plain and not config.plugins.use and config.parallelism.pipeline_parallel_degree == 1
        self.counts = plain and device.type == "cpu"
        self.saved: int | None = None
        self.since: tuple[int, float] | None = None

    @contextmanager
    def first_micro_batch(self, step: int, model: nn.Module) -> Iterator[None]:
        """Counts what autograd saves within the block, if it is the step's turn.

        On a CPU, without a pipeline, recompute or offload.
        """
        if step != STEP or not self.counts:
            yield
            return
        storages: dict[int, torch.UntypedStorage] = {}
        held = {_storage(parameter)._cdata for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            if storage._cdata not in held:
                storages[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        # Parameters that FSDP gathered for compute are empty by now.
        self.saved = sum(storage.nbytes() for storage in storages.values())

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
            predicted = kept_bytes(shape, run, run.stages[0])
            memory = (
                f"saved activations {predicted / 2**20:.2f} MiB, measured {self.saved / 2**20:.2f} "
                f"({predicted / self.saved - 1:+.1%})"
            )
        if system is None:
            return f"predicted {memory}; {speed:,.0f} tokens/s (no speed is predicted for this device)"
        rate = predict(shape, run, system)["tokens_per_s_per_gpu"] * self.world
        return f"predicted {memory}; {rate:,.0f} tokens/s, measured {speed:,.0f}"

    def _system(self) -> System | None:
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((system_of(part.lower()) for part in _DEVICES if part in name), None)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
