"""A network of all kinds of parameters under several layouts, with values and gradients by name and step."""

from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_moe.distributed import local_box
from titan_moe.fsdp_ep import apply_fsdp

LAYOUTS = {
    # (dp_replicate, fsdp, tp), (edp_replicate, edp_shard, ep, etp)
    "fsdp3": ((1, 3, 1), (1, 3, 1, 1)),
    "hsdp2x2": ((2, 2, 1), (2, 2, 1, 1)),
    "fsdp2_tp2_ep4": ((1, 2, 2), (1, 1, 4, 1)),
    "tp4_ep2_etp2": ((1, 1, 4), (1, 1, 2, 2)),
    "fsdp4_edp2_etp2": ((1, 4, 1), (1, 2, 1, 2)),
}
_TP = {"q.weight": 0, "o.weight": 1, "lm_head.weight": 0}
_ETP = {"experts.w1": 2, "experts.w2": 2}


class Experts(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(5, 2, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(5, dim, hidden))
        self.b1 = nn.Parameter(torch.empty(5, 2, hidden))


class Net(nn.Module):
    def __init__(self, dim=8, hidden=6, heads=12, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(7, dim)
        self.q = nn.Linear(dim, heads, bias=False)
        self.o = nn.Linear(heads, dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        self.experts = Experts(dim, hidden)
        self.lm_head = nn.Linear(dim, 7, bias=False)
        self.to(dtype)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(values(name, parameter.shape))


def values(key, shape):
    """Normal float64 values that depend on nothing but the key and the shape."""
    generator = torch.Generator().manual_seed(sum((i + 1) * byte for i, byte in enumerate(key.encode())))
    return torch.randn(prod(shape), generator=generator, dtype=torch.float64).view(tuple(shape))


def build(layout=None, **sizes):
    """The network, on the ranks of a layout or whole."""
    net = Net(**sizes)
    if layout is None:
        return net
    (replicate, fsdp, tp), (edp_replicate, edp_shard, ep, etp) = LAYOUTS[layout]
    dense = init_device_mesh("cpu", (replicate, fsdp, tp), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
    expert = init_device_mesh(
        "cpu", (edp_replicate, edp_shard, ep, etp), mesh_dim_names=("edp_replicate", "edp_shard", "ep", "etp")
    )
    for name, parameter in list(net.named_parameters()):
        path, _, last = name.rpartition(".")
        if path == "experts":
            hidden = Shard(2)
            placed = distribute_tensor(parameter.data, expert["ep", "etp"], [Shard(0), hidden])
        elif tp > 1 and name in _TP:
            placed = distribute_tensor(parameter.data, dense["tp"], [Shard(_TP[name])])
        else:
            continue
        setattr(net.get_submodule(path), last, nn.Parameter(placed))
    return apply_fsdp(
        net,
        dense["dp_replicate", "fsdp"] if replicate > 1 else dense["fsdp"],
        experts_mesh=expert["edp_replicate", "edp_shard"] if edp_replicate > 1 else expert["edp_shard"],
        experts=[net.experts],
    )


def part_of(whole, like):
    """The slice of ``whole`` that this rank's part of ``like`` is."""
    if not isinstance(like, DTensor):
        return whole
    offsets, sizes = local_box(like)
    part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    return part.reshape(like.to_local().shape) if not part.numel() else part


def give_grads(net, step):
    """The gradients of a step, the same under every layout."""
    for name, parameter in net.named_parameters():
        whole = values(f"{name} {step}", parameter.shape).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            local = part_of(whole, parameter).contiguous()
            parameter.grad = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            parameter.grad = whole


def run_steps(net, optimizer, steps):
    for step in steps:
        give_grads(net, step)
        optimizer.step()
        optimizer.zero_grad()


def whole_state(net, optimizer):
    """Parameters and state by name, as plain tensors of this rank."""
    tensors = dict(net.named_parameters())
    for name, parameter in list(tensors.items()):
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}|{key}"] = value
    return tensors


def differing(net, optimizer, whole):
    """Names whose part on this rank is not bitwise that of ``whole``."""
    wrong = []
    own = whole_state(net, optimizer)
    for name in own.keys() | whole.keys():
        if name not in own or name not in whole:
            wrong.append(name)
            continue
        local = own[name].to_local() if isinstance(own[name], DTensor) else own[name]
        want = part_of(whole[name], own[name])
        if local.dtype != want.dtype or not torch.equal(_bits(local), _bits(want)):
            wrong.append(name)
    return sorted(wrong)


def _bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8) if tensor.ndim else tensor.detach()
