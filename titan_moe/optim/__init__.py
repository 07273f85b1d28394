"""The optimizer, its learning-rate schedule, gradient clipping and loss scaling."""

from titan_moe.optim.clip import clip_grad_norm
from titan_moe.optim.groups import decays
from titan_moe.optim.optimizer import Optimizer, build_optimizer, set_lr
from titan_moe.optim.scaler import LossScaler
from titan_moe.optim.schedule import LRSchedule

__all__ = ["LRSchedule", "LossScaler", "Optimizer", "build_optimizer", "clip_grad_norm", "decays", "set_lr"]
