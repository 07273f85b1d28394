"""Metrics, console output, profiling and the run report. Names load on first use: a report needs no torch."""

from importlib import import_module

_HOMES = {
    "TIMING_KEYS": "metrics",
    "MetricsLogger": "metrics",
    "flops_per_token": "flops",
    "peak_flops": "flops",
    "Profiler": "profiling",
    "write_report": "report",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_moe.observe' has no attribute {name!r}")
    return getattr(import_module(f"titan_moe.observe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
