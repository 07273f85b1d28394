"""Fully sharded data parallel for any module, with gradients that are sums over the ranks."""

from titan_moe.fsdp_ep.apply import apply_fsdp, find_blocks, find_experts

__all__ = ["apply_fsdp", "find_blocks", "find_experts"]
