"""Metrics, console output, profiling and the run report."""

from titan_moe.observe.flops import flops_per_token, peak_flops
from titan_moe.observe.metrics import TIMING_KEYS, MetricsLogger
from titan_moe.observe.profiling import profiling
from titan_moe.observe.report import write_report

__all__ = ["TIMING_KEYS", "MetricsLogger", "flops_per_token", "peak_flops", "profiling", "write_report"]
