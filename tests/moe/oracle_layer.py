"""The layer as a loop over rows in float64, written to be obviously right and for nothing else."""

import math

import torch
from torch import Tensor


def oracle_activation(z: Tensor, act) -> Tensor:
    """z ``[n, F]``: gate and up, or up alone."""
    if act.kind == "relu2":
        return torch.relu(z[0]) ** 2
    gate, up = z[0], z[1]
    if act.kind == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if act.kind == "geglu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    gate = torch.minimum(gate, z.new_tensor(act.limit))
    up = torch.maximum(torch.minimum(up, z.new_tensor(act.limit)), z.new_tensor(-act.limit))
    return (up + 1) * gate / (1 + torch.exp(-act.alpha * gate))


def oracle_expert(x_D: Tensor, e: int, weight: Tensor, p: dict[str, Tensor], act, weight_on: str) -> Tensor:
    """One token through one expert, weighted. ``p`` holds w1, w2 and maybe b1, b2 of all experts."""
    if weight_on == "input":
        x_D = x_D * weight
    z = p["w1"][e] @ x_D
    if "b1" in p:
        z = z + p["b1"][e]
    y = p["w2"][e] @ oracle_activation(z, act)
    if "b2" in p:
        y = y + p["b2"][e]
    return y if weight_on == "input" else weight * y


def oracle_experts(x_RD: Tensor, expert_of_rows: list[int], weights_R: Tensor, p, act, weight_on: str) -> Tensor:
    """Rows through their experts. Every parameter stays in the graph."""
    anchor = sum(t.sum() for t in p.values()) * 0 + weights_R.sum() * 0
    rows = [oracle_expert(x_RD[r], e, weights_R[r], p, act, weight_on) for r, e in enumerate(expert_of_rows)]
    return (torch.stack(rows) if rows else x_RD[:0]) + anchor
