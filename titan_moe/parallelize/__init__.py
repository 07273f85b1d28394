"""Any layout of a plain ``nn.Module``: meshes, plans, and the styles that plans name."""

import sys
from types import ModuleType

from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.build import Whole, build_model
from titan_moe.parallelize.check import check_layout
from titan_moe.parallelize.context import shard_sequence
from titan_moe.parallelize.mesh import Meshes, build_meshes
from titan_moe.parallelize.pipeline import Pipeline
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.plans import plan_for
from titan_moe.parallelize.styles import (
    Attention,
    Colwise,
    Experts,
    Replicate,
    Router,
    Rowwise,
    SequenceParallel,
    VocabParallel,
)
from titan_moe.parallelize.swap import MoEAdapter, swap_moe

__all__ = [
    "Attention",
    "Colwise",
    "Experts",
    "Meshes",
    "MoEAdapter",
    "Pipeline",
    "Plan",
    "Replicate",
    "Router",
    "Rowwise",
    "SequenceParallel",
    "VocabParallel",
    "Whole",
    "build_meshes",
    "build_model",
    "check_layout",
    "parallelize",
    "plan_for",
    "shard_sequence",
    "swap_moe",
]


class _CallableModule(ModuleType):
    # The package and its main function share a name: titan_moe.parallelize(model, meshes) is to work either way.
    def __call__(self, *args, **kwargs):
        return parallelize(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
