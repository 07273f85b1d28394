"""Dynamic loss scaling, for gradients that would underflow in float16."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_moe.errors import TrainingError

_SMALLEST = 2.0**-14


class LossScaler:
    """Multiplies the loss by a power of two that halves on overflow and doubles after a run of good steps.

    Whether a step overflowed is read off the global gradient norm, which is the same on every rank, so all ranks
    decide alike without a collective of their own. When disabled, ``scale`` stays 1 and nothing is done.

    Args:
        enabled: True for float16 compute.
        initial_scale: first scale.
        growth_interval: good steps in a row before the scale doubles.
    """

    def __init__(self, enabled: bool, initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.scale = initial_scale if enabled else 1.0
        self._interval = growth_interval
        self._good_steps = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by the scale, in place. Call it once per step, before clipping."""
        if not self.enabled:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], 1.0 / self.scale)

    def update(self, finite: bool) -> None:
        """Tell whether the step's gradient norm was finite. The caller skips the optimizer step when it was not.

        Raises:
            TrainingError: when gradients overflow at every scale.
        """
        if not self.enabled:
            return
        if not finite:
            self.scale, self._good_steps = self.scale / 2, 0
            if self.scale < _SMALLEST:
                raise TrainingError(
                    f"the loss scale fell to {self.scale!r} and gradients still overflow float16: lower optimizer.lr, "
                    "or set training.mixed_precision_param to bfloat16"
                )
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.scale, self._good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()``."""
        if self.enabled:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
