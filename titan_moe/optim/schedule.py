"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from titan_moe.config.job import LRScheduler
from titan_moe.errors import ConfigError


class LRSchedule:
    """Linear warm-up, then constant, then decay (warm-up-stable-decay).

    Without ``decay_ratio`` the decay starts right after the warm-up; with it, it takes the last
    ``decay_ratio * total_steps`` steps, fewer if the warm-up needs them. The decay would reach
    ``min_lr_factor`` one step after the last, so that no step is spent at a learning rate of zero. A warm-up
    longer than the run is cut to the run.

    Args:
        config: the ``[lr_scheduler]`` section.
        peak: peak learning rate.
        total_steps: optimizer steps of the whole run.

    Raises:
        ConfigError: for a value outside its range.
    """

    def __init__(self, config: LRScheduler, peak: float, total_steps: int) -> None:
        for name in ("decay_ratio", "min_lr_factor"):
            value = getattr(config, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"lr_scheduler.{name} = {value!r}: must be between 0 and 1")
        if config.warmup_steps < 0:
            raise ConfigError(f"lr_scheduler.warmup_steps = {config.warmup_steps}: must be 0 or more")
        if config.decay_type not in _SHAPES:
            raise ConfigError(f"lr_scheduler.decay_type = {config.decay_type!r}: must be one of {', '.join(_SHAPES)}")
        self._shape = _SHAPES[config.decay_type]
        self._floor = config.min_lr_factor
        self._peak = peak
        self._warmup = min(config.warmup_steps, total_steps)
        after_warmup = total_steps - self._warmup
        decay = after_warmup if config.decay_ratio is None else round(total_steps * config.decay_ratio)
        self._decay = min(decay, after_warmup)
        self._decay_start = total_steps - self._decay

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 1."""
        if step <= self._warmup:
            return self._peak * step / self._warmup
        if step <= self._decay_start or self._decay == 0:
            return self._peak
        progress = min((step - 1 - self._decay_start) / self._decay, 1.0)
        return self._peak * (self._floor + (1 - self._floor) * self._shape(progress))


_SHAPES = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
