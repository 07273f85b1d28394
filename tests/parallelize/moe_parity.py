"""One MoE layer over several ranks against the same layer in one process: everything, on every rank."""

import copy
import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from titan_moe.moe import MoE, MoEConfig
from titan_moe.moe.dispatch import build_dispatcher, expert_range

SIZES = {"dim": 6, "hidden_dim": 8, "num_experts": 8, "top_k": 2}
DISPATCHERS = ["allgather", "alltoall", "deepep", "hybridep"]


def use_double():
    """Put the double of ``deep_ep`` where the package would be, in this process."""
    path = str(Path(__file__).parents[1] / "doubles")
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module("deep_ep")


def build(dtype=torch.float64, **overrides):
    """A layer of ``SIZES`` with every parameter random, alike on every rank."""
    torch.manual_seed(3)
    layer = MoE(MoEConfig(**{**SIZES, **overrides})).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    if layer.router.expert_bias is not None:
        torch.nn.init.normal_(layer.router.expert_bias, std=0.3)
    return layer


def data(B, S, dim, dtype=torch.float64):
    """Input and the gradient of the output."""
    torch.manual_seed(4)
    return torch.randn(B, S, dim, dtype=dtype), torch.randn(B, S, dim, dtype=dtype)


def expert_slice(tensor, name, ep, etp, rank):
    """The part of an expert parameter that group rank ``rank`` holds, etp fastest."""
    first, last = expert_range(tensor.shape[0], ep, rank // etp)
    part = tensor[first:last]
    dim = {"w1": 2, "b1": 2, "w2": 2}.get(name)
    return part if dim is None else part.tensor_split(etp, dim)[rank % etp]


def spread(layer, dispatcher, etp=1, group=None, **options):
    """A copy of ``layer`` whose experts are this rank's part."""
    if dispatcher in ("deepep", "hybridep"):
        use_double()
    group = group or dist.group.WORLD
    rank, ep = dist.get_rank(group), dist.get_world_size(group) // etp
    local = copy.deepcopy(layer)
    for name, parameter in layer.experts.named_parameters():
        part = expert_slice(parameter.detach(), name, ep, etp, rank).clone()
        setattr(local.experts, name, torch.nn.Parameter(part))
    local.experts.adds_b2 = rank % etp == 0
    local.dispatcher = build_dispatcher(
        dispatcher, num_experts=layer.config.num_experts, ep_group=group, etp_size=etp, **options
    )
    return local


def run(layer, x, dy, valid=None):
    """Forward and backward: output, gradients by name, gradient of the routing weights, counts."""
    layer.zero_grad()
    seen = []
    route = layer.route

    def watched(*args):
        routing, aux = route(*args)
        if routing.weights_TK.requires_grad:
            routing.weights_TK.retain_grad()
        seen.append(routing.weights_TK)
        return routing, aux

    layer.route = watched
    x = x.detach().requires_grad_()
    y = layer(x, valid)
    y.backward(dy)
    del layer.route
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": seen[0].grad, "counts": layer.balance.counts_E, **gradients}


def reference(layer, x, dy, sizes, whole, valid=None):
    """All tokens in one process: in one call, or one call per rank where capacity is per rank; rows of each rank."""
    layer.balance.reset()
    if whole:
        return run(layer, x, dy, valid)
    parts = [run(layer, *(t.split(sizes, 1)[r] for t in (x, dy))) for r in range(len(sizes))]
    joined = {name: torch.cat([p[name] for p in parts], 1) for name in ("y", "x")}
    total = {n: sum(p[n] for p in parts) for n in parts[0] if n not in ("y", "x", "weights", "counts")}
    return {**joined, "weights": torch.cat([p["weights"] for p in parts]), "counts": parts[-1]["counts"], **total}


def differences(dispatcher, overrides, sizes, how=()):
    """Runs on every rank. Greatest absolute difference by name: rows and experts of this rank, sums of the others.

    Args:
        sizes: tokens of each rank, per sequence.
        how: any of ``etp``; ``batch``, sequences, each split over the ranks; ``whole`` False, capacity is per rank;
            ``padded``; ``options`` of the dispatcher.
    """
    how = dict(how)
    etp, batch, whole, padded, options = (
        how.pop(k, v) for k, v in {"etp": 1, "batch": 1, "whole": True, "padded": False, "options": {}}.items()
    )
    assert not how, how
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = build(**overrides)
    x, dy = data(batch, sum(sizes), layer.config.dim)
    valid = None
    if padded:
        valid = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(5)) < 0.6
        valid[0, 0] = True
    layer.balance.token_weight = torch.tensor(0.37, dtype=torch.float64)
    local = spread(layer, dispatcher, etp, **options)
    local.balance.reduce_counts = local.balance.share_counts = all_reduce
    want = reference(layer, x, dy, sizes, whole, valid)

    mine = [None if t is None else t.split(sizes, 1)[rank] for t in (x, dy, valid)]
    got = run(local, *mine)
    rows = torch.arange(batch * sum(sizes)).view(batch, -1).split(sizes, 1)[rank].flatten()
    out = {}
    for name, expected in want.items():
        actual = got[name]
        if name in ("y", "x"):
            expected = expected.split(sizes, 1)[rank]
        elif name == "weights":
            expected = expected[rows]
        elif name.startswith("experts."):
            expected = expert_slice(expected, name.removeprefix("experts."), world // etp, etp, rank)
            if name == "experts.b2" and etp > 1:
                # Replicated over etp, its gradient a partial sum.
                assert rank % etp == 0 or actual.count_nonzero() == 0
                expected = expected if rank % etp == 0 else torch.zeros_like(expected)
        else:
            actual = all_reduce(actual.clone())
        assert actual is not None and actual.shape == expected.shape, (name, actual, expected)
        out[name] = (actual - expected).abs().max().item() if expected.numel() else 0.0
    return out


def all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


def assert_same(results, tolerance=1e-10):
    """``tolerance``: float64 sums of some dozens of terms of magnitude 1 to 10, in another order."""
    for rank, found in enumerate(results):
        worst = max(found, key=found.get)
        assert found[worst] < tolerance, (rank, {k: v for k, v in found.items() if v >= tolerance})
