"""Any layout of a plain ``nn.Module``: meshes, plans, and the styles that plans name.

Names load on first use: whether a layout is legal is asked without torch.
"""

import sys
from importlib import import_module
from types import ModuleType

_HOMES = {
    "Attention": "styles",
    "Colwise": "styles",
    "Experts": "styles",
    "Meshes": "mesh",
    "Listed": "swap",
    "MoEAdapter": "swap",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "Replicate": "styles",
    "Router": "styles",
    "Rowwise": "styles",
    "SequenceParallel": "styles",
    "Stacked": "swap",
    "VocabParallel": "styles",
    "Whole": "build",
    "build_meshes": "mesh",
    "build_model": "build",
    "check_run": "check",
    "compile_layers": "build",
    "parallelize": "apply",
    "plan_for": "plans",
    "shard_sequence": "context",
    "swap_moe": "swap",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_moe.parallelize' has no attribute {name!r}")
    return getattr(import_module(f"titan_moe.parallelize.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableModule(ModuleType):
    # The package and its main function share a name: titan_moe.parallelize(model, meshes) is to work either way.
    def __call__(self, *args, **kwargs):
        return __getattr__("parallelize")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
