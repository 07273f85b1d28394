"""Any layout of a plain ``nn.Module``: meshes, plans, and the styles that plans name."""

from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.mesh import Meshes, build_meshes
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

__all__ = [
    "Attention",
    "Colwise",
    "Experts",
    "Meshes",
    "Plan",
    "Replicate",
    "Router",
    "Rowwise",
    "SequenceParallel",
    "VocabParallel",
    "build_meshes",
    "parallelize",
    "plan_for",
]
