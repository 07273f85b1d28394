"""The layer as a loop over rows in float64, written to be obviously right and for nothing else."""

import math

import oracle_routing as routing
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


def oracle_ffn(x_D: Tensor, p: dict[str, Tensor], act) -> Tensor:
    """One token through the shared expert; ``p`` holds gate_proj.weight (unless relu2), up_proj..., gate.weight."""
    names = ("gate_proj.weight", "up_proj.weight")
    z = torch.stack([p[name] @ x_D for name in names if name in p])
    y = p["down_proj.weight"] @ oracle_activation(z, act)
    return y if "gate.weight" not in p else y / (1 + torch.exp(-(p["gate.weight"] @ x_D)))


def oracle_layer(x_BSD: Tensor, p: dict[str, Tensor], config, act, bias=None, valid_BS=None):
    """The whole layer in training mode: output and weighted sum of the auxiliary losses (0 if there are none)."""
    B, S, D = x_BSD.shape
    x = x_BSD.reshape(B * S, D)
    valid = [True] * (B * S) if valid_BS is None else valid_BS.flatten().tolist()
    logits = x @ p["router.weight"].T + (p["router.bias"] if "router.bias" in p else 0)
    routed = routing.route(logits, config, bias, valid)
    if config.capacity_factor is not None:
        limit = math.ceil(sum(valid) * config.top_k / config.num_experts * config.capacity_factor)
        routed = routing.drop(routed, config.num_experts, limit, config.drop_policy)

    experts = {k.removeprefix("experts."): v for k, v in p.items() if k.startswith("experts.")}
    shared = {k.removeprefix("shared."): v for k, v in p.items() if k.startswith("shared.")}
    rows = []
    for t, chosen in enumerate(routed):
        h = x[t] if config.latent_dim is None else p["latent_down.weight"] @ x[t]
        y = torch.zeros_like(h)
        for e, weight in chosen.items():
            y = y + oracle_expert(h, e, weight, experts, act, config.weight_on)
        if config.latent_dim is not None:
            y = p["latent_up.weight"] @ y
        rows.append(y + oracle_ffn(x[t], shared, act) if shared else y)
    return torch.stack(rows).view(B, S, D), oracle_losses(logits, config, valid, B)


def oracle_losses(logits: Tensor, config, valid: list[bool], num_sequences: int) -> Tensor:
    """All auxiliary losses of one micro-batch, the first of its step."""
    S = len(valid) // num_sequences
    whole = routing.balance_loss(logits, config, valid)[0]
    loss = (config.aux_loss_coef + config.global_aux_loss_coef) * whole
    for s in range(num_sequences):
        part = slice(s * S, (s + 1) * S)
        if any(valid[part]):
            share = sum(valid[part]) / sum(valid)
            sequence = routing.balance_loss(logits[part], config, valid[part])[0]
            loss = loss + config.seq_aux_loss_coef * share * sequence
    return loss + config.z_loss_coef * routing.z_loss(logits, valid)
