"""Limits on the tokens of one expert: drops, and zero-weight slots that round counts up.

All of it works on the routing map [T, E] with static shapes and never waits for the device. Dropped slots hold id -1
and weight 0; the weights that stay are not renormalised. Zero-weight slots go to tokens not yet routed to the
expert, so an expert never sees a token twice and never holds more than T rows.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from titan_moe.kernels.router_topk import stable_topk
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.routing import Routing, count_experts

_DENOMINATOR = 10**6


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float = 1.0) -> int:
    """Rows of one expert: ceil(T K / E x factor), and at most T, since a token goes to an expert once.

    The factor stands for the nearest fraction with a denominator of at most a million, so 1.1 for 11/10: in floating
    point 100 x 2 / 4 x 1.1 is more than 55.
    """
    numerator, denominator = _share(top_k, num_experts, factor)
    return -(-num_tokens * numerator // denominator)


@torch.compiler.assume_constant_result  # Fractions cannot be traced; the numbers are those of the configuration.
def _share(top_k: int, num_experts: int, factor: float) -> tuple[int, int]:
    """An expert's share of the tokens, K / E x factor and at most 1, as numerator and denominator.

    Both are below 2^63 / T for any T that fits in memory, so that the product with T tokens is exact in int64.
    """
    exact = max(Fraction(factor).limit_denominator(_DENOMINATOR), Fraction(1, _DENOMINATOR))
    return min(exact * top_k / num_experts, Fraction(1)).as_integer_ratio()


def valid_capacity(
    num_tokens: int, valid_T: Tensor | None, top_k: int, num_experts: int, factor: float = 1.0
) -> Tensor | int:
    """``capacity`` of the real tokens alone, as a 0-d int64 tensor where padding is marked.

    Padding would otherwise raise the limit, and a padded batch would drop other tokens than an unpadded one.
    """
    if valid_T is None:
        return capacity(num_tokens, top_k, num_experts, factor)
    n = valid_T.sum()
    numerator, denominator = _share(top_k, num_experts, factor)
    return -(-n * numerator // denominator)


def apply_capacity(routing: Routing, config: MoEConfig, valid_T: Tensor | None = None) -> Routing:
    """Drop what exceeds each expert's capacity and, with ``pad_to_capacity``, fill every expert up to it.

    The capacity counts real tokens, ``C = ceil(n K / E x capacity_factor)``. Policy ``probs`` keeps an expert's C
    highest weights (ties: the lower token index), ``position`` its first C tokens. ``pad_to_capacity`` gives every
    expert exactly ``min(T, C of all T tokens)`` rows, so that shapes are static; where C exceeds T an expert can
    never fill it.

    Args:
        routing: a choice of ``top_k`` experts per token.
        config: ``capacity_factor``, ``drop_policy``, ``pad_to_capacity``; without a capacity nothing changes.
        valid_T: bool; False marks padding, which gets a zero-weight slot only where real tokens run out.
    """
    if config.capacity_factor is None:
        return routing
    T, K = routing.expert_ids_TK.shape
    E = routing.counts.shape[-1]
    rows = capacity(T, config.top_k, E, config.capacity_factor)
    limit = valid_capacity(T, valid_T, config.top_k, E, config.capacity_factor)
    map_TE = _routing_map(routing)
    if config.drop_policy == "position":
        keep_TE = map_TE & (map_TE.cumsum(0) <= limit)
    else:
        weights_TE = _dense_weights(routing).detach()
        # A NaN weight stays first, so that divergence shows.
        keys_TE = torch.nan_to_num(weights_TE, nan=torch.finfo(weights_TE.dtype).max)
        best_EC = stable_topk(torch.where(map_TE, keys_TE, -math.inf).T, rows)
        within_EC = (torch.arange(rows, device=best_EC.device) < limit).expand(E, rows)
        keep_TE = map_TE & torch.zeros_like(map_TE.T).scatter_(1, best_EC, within_EC).T
    slot_TK = routing.expert_ids_TK.clamp_min(0).long()
    keep_TK = keep_TE.gather(1, slot_TK) & (routing.expert_ids_TK >= 0)
    ids_TK = torch.where(keep_TK, routing.expert_ids_TK, -1)
    weights_TK = torch.where(keep_TK, routing.weights_TK, 0.0)
    kept = Routing(ids_TK, weights_TK, count_experts(ids_TK, E), min(T * K, E * rows))
    if not config.pad_to_capacity:
        return kept
    return _fill(kept, torch.full_like(kept.counts_E, rows), E * rows, valid_T)


def pad_counts(routing: Routing, multiple: int, valid_T: Tensor | None = None) -> Routing:
    """Round each expert's count up to a multiple with zero-weight slots on its first unrouted tokens.

    Quantised products want groups of 16 (fp8) or 32 (mxfp8) rows. An expert holds at most T rows: a count that
    rounds up beyond T, which needs a T that is no multiple itself, stops at T. Experts without tokens stay empty.

    Args:
        routing: any routing; the result has K = E.
        multiple: 1 changes nothing.
        valid_T: bool; False marks padding, which gets a slot only where real tokens run out.
    """
    if multiple == 1:
        return routing
    T, E = routing.expert_ids_TK.shape[0], routing.counts.shape[-1]
    target_E = ((routing.counts_E + multiple - 1) // multiple * multiple).clamp_max(T)
    return _fill(routing, target_E, min(T * E, routing.max_rows + E * (multiple - 1)), valid_T)


def _routing_map(routing: Routing) -> Tensor:
    """Bool ``[T, E]``."""
    T, E = routing.expert_ids_TK.shape[0], routing.counts.shape[-1]
    used = torch.zeros(T, E + 1, dtype=torch.bool, device=routing.counts.device)
    return used.scatter_(1, routing.expert_ids_TK.long() % (E + 1), True)[:, :E]


def _dense_weights(routing: Routing) -> Tensor:
    """Weights as ``[T, E]``, 0 where not routed."""
    T, E = routing.expert_ids_TK.shape[0], routing.counts.shape[-1]
    slots_TK = routing.expert_ids_TK.long() % (E + 1)
    return routing.weights_TK.new_zeros(T, E + 1).scatter(1, slots_TK, routing.weights_TK)[:, :E]


def _fill(routing: Routing, target_E: Tensor, max_rows: int, valid_T: Tensor | None) -> Routing:
    """Give each expert zero-weight slots up to its target, on unrouted real tokens first, then on padding."""
    map_TE = _routing_map(routing)
    missing_E = target_E - routing.counts_E
    free_TE = ~map_TE if valid_T is None else ~map_TE & valid_T[:, None]
    map_TE = map_TE | free_TE & (free_TE.cumsum(0) <= missing_E)
    if valid_T is not None:
        missing_E = missing_E - free_TE.sum(0)
        # Padding may hold slots already, from an earlier fill.
        free_TE = ~map_TE & ~valid_T[:, None]
        map_TE = map_TE | free_TE & (free_TE.cumsum(0) <= missing_E)
    experts_E = torch.arange(map_TE.shape[1], device=map_TE.device)
    return Routing(torch.where(map_TE, experts_E, -1), _dense_weights(routing), target_E, max_rows)
