"""Routing, balancing losses and capacity as plain loops over tokens and experts, on float64 scalars."""

import math

import torch
from torch import Tensor


def best(values: list[float], k: int) -> list[int]:
    """Indices of the k largest, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def scores(logits: Tensor, function: str) -> list[Tensor]:
    """Scores of one token."""
    if function == "softmax":
        total = sum(logit.exp() for logit in logits)
        return [logit.exp() / total for logit in logits]
    if function == "sigmoid":
        return [1 / (1 + (-logit).exp()) for logit in logits]
    return [(1 + logit.exp()).log().sqrt() for logit in logits]


def balanced_assignment(logits: Tensor, rows: list[int]) -> dict[int, list[float]]:
    """Sinkhorn scaling of the given rows, until the column scales move by less than 1e-4 on average."""
    E = logits.shape[1]
    cost = {t: [math.exp(v) for v in logits[t].tolist()] for t in rows}
    column = [1.0] * E
    while True:
        row = {t: 1 / len(rows) / sum(c * d for c, d in zip(cost[t], column, strict=True)) for t in rows}
        new = [1 / E / sum(row[t] * cost[t][e] for t in rows) for e in range(E)]
        change = sum(abs(a - b) for a, b in zip(new, column, strict=True)) / E
        column = new
        if change < 1e-4:
            return {t: [row[t] * cost[t][e] * column[e] for e in range(E)] for t in rows}


def route(logits: Tensor, config, bias=None, valid=None, training=True) -> list[dict[int, Tensor]]:
    """Per token: expert id -> weight, best expert first."""
    T, E = logits.shape
    K, G = config.top_k, config.num_groups
    real = [t for t in range(T) if valid is None or valid[t]]
    if config.selection == "expert_choice":
        routed: list[dict[int, Tensor]] = [{} for _ in range(T)]
        for e in range(E):
            column = {t: scores(logits[t], config.score_function)[e] for t in real}
            take = math.ceil(len(real) * K / E)
            for t in sorted(column, key=lambda t: (-column[t].item(), t))[:take]:
                routed[t][e] = column[t] * config.route_scale
        return routed
    plan = balanced_assignment(logits.detach(), real) if config.selection == "sinkhorn" and training else None
    routed = []
    for t in range(T):
        if t not in real:
            routed.append({})
            continue
        s = scores(logits[t], config.score_function)
        key = [v.item() + (bias[e].item() if bias is not None else 0.0) for e, v in enumerate(s)]
        if G > 1:
            members = [list(range(g * E // G, (g + 1) * E // G)) for g in range(G)]
            group = [sum(sorted((key[e] for e in m), reverse=True)[: config.group_score_k]) for m in members]
            kept = best(group, config.topk_groups)
            masked = -math.inf if config.group_mask == "-inf" else 0.0
            key = [key[e] if e * G // E in kept else masked for e in range(E)]
        ids = best(plan[t] if plan else key, K)
        if config.selection == "round_robin":
            ids = [(t * K + k) % E for k in range(K)]
        weights = [s[e] for e in ids]
        if config.normalize_weights and (K > 1 or config.score_function == "softmax"):
            total = sum(weights)
            weights = [w / total for w in weights]
        routed.append({e: w * config.route_scale for e, w in zip(ids, weights, strict=True)})
    return routed


def balance_loss(logits: Tensor, config, valid=None, totals=None) -> tuple[Tensor, list[int]]:
    """E x sum_e f_e p_e over the given tokens, and the counts. ``totals``: counts that give f instead."""
    T, E = logits.shape
    real = [t for t in range(T) if valid is None or valid[t]]
    counts, mean = [0] * E, [torch.zeros((), dtype=torch.float64)] * E
    for t in real:
        s = scores(logits[t], config.score_function)
        for e in best([v.item() for v in s], config.top_k):
            counts[e] += 1
        mean = [m + v / sum(s) / len(real) for m, v in zip(mean, s, strict=True)]
    used = totals or counts
    return E * sum(c / max(sum(used), 1) * m for c, m in zip(used, mean, strict=True)), counts


def z_loss(logits: Tensor, valid=None) -> Tensor:
    """Mean over real tokens of logsumexp squared."""
    real = [t for t in range(logits.shape[0]) if valid is None or valid[t]]
    return sum(sum(v.exp() for v in logits[t]).log() ** 2 for t in real) / len(real)


def drop(routed: list[dict[int, Tensor]], num_experts: int, limit: int, policy: str) -> list[dict[int, Tensor]]:
    """Keep ``limit`` tokens per expert."""
    kept = [dict(row) for row in routed]
    for e in range(num_experts):
        tokens = [t for t, row in enumerate(routed) if e in row]
        if policy == "probs":
            tokens.sort(key=lambda t: (-routed[t][e].item(), t))
        for t in tokens[limit:]:
            del kept[t][e]
    return kept


def dense(routed: list[dict[int, Tensor]], num_experts: int) -> Tensor:
    """Weights ``[T, E]``, 0 where not routed."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([torch.stack([row.get(e, zero) for e in range(num_experts)]) for row in routed])
