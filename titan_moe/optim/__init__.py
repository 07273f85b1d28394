"""The optimizer, its learning-rate schedule, gradient clipping and loss scaling."""

from titan_moe.optim.clip import clip_grad_norm
from titan_moe.optim.groups import choose, decays
from titan_moe.optim.optimizer import Optimizer, OptimizerBytes, build_optimizer, optimizer_bytes, set_lr
from titan_moe.optim.scaler import LossScaler
from titan_moe.optim.schedule import LRSchedule

__all__ = [
    "LRSchedule",
    "LossScaler",
    "Optimizer",
    "OptimizerBytes",
    "build_optimizer",
    "choose",
    "clip_grad_norm",
    "decays",
    "optimizer_bytes",
    "set_lr",
]
