"""A small network on both meshes, in plain torch: a dense pair over ``tp``, experts over ``(ep, etp)``.

Every token visits every expert, weighted by a softmax gate, so that nothing depends on which tokens a rank holds.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_gather_into_tensor, reduce_scatter_tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titan_moe.config.job import Parallelism
from titan_moe.distributed import local_box
from titan_moe.fsdp_ep import apply_fsdp
from titan_moe.parallelize.crossing import to_local
from titan_moe.parallelize.mesh import Meshes, build_meshes

DIM, HIDDEN, VOCAB, LENGTH, ROWS = 6, 8, 11, 4, 16


class Gather(torch.autograd.Function):
    """All-gather along dim 0; the gradient is the sum of what all ranks say about this rank's part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        all_gather_into_tensor(out, x.contiguous(), group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class ScatterSum(torch.autograd.Function):
    """Reduce-scatter along dim 0; its gradient gathers."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.shape[0] * ctx.group.size(), *grad.shape[1:])
        all_gather_into_tensor(out, grad.contiguous(), ctx.group)
        return out, None


class Gate(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, DIM))

    def forward(self, x):
        # Replicated over tp, whose ranks have different tokens.
        return torch.softmax(x @ to_local(self.weight, [Partial()]).T, -1)


class Mixture(nn.Module):
    """The experts' weights; computes on those this rank has."""

    def __init__(self, experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.empty(experts, DIM, HIDDEN))
        self.group = None

    def forward(self, x, gates):
        w1, w2 = to_local(self.w1, None), to_local(self.w2, None)
        first = 0
        if self.group is not None:
            x, gates = Gather.apply(x, self.group), Gather.apply(gates, self.group)
            first = self.first
        hidden = torch.tanh(torch.einsum("td,efd->tef", x, w1)) * gates[:, first : first + len(w1), None]
        y = torch.einsum("tef,edf->td", hidden, w2)
        return y if self.group is None else ScatterSum.apply(y, self.group)


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.scale = nn.Parameter(torch.empty(DIM))
        self.gate = Gate(experts)
        self.experts = Mixture(experts)
        self.tp = None

    def forward(self, x):
        x = self.dense(x * self.scale)
        if self.tp is None:
            return x + self.experts(x, self.gate(x))
        own = DTensor.from_local(x, self.tp, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        y = self.experts(own, self.gate(own))
        return x + DTensor.from_local(y, self.tp, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()

    def dense(self, x):
        if self.tp is None:
            return x + self.down(torch.tanh(self.up(x)))
        whole = DTensor.from_local(x, self.tp, [Replicate()])
        y = torch.tanh(whole @ self.up.weight.T) @ self.down.weight.T
        return x + y.redistribute(placements=[Replicate()]).to_local()


class Net(nn.Module):
    def __init__(self, experts=8, blocks=2, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block(experts) for i in range(blocks)})
        self.head = nn.Linear(DIM, VOCAB)
        self.to(dtype)

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def fill(net):
    """Fixed values by name, of the full tensors."""
    for i, parameter in enumerate(net.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        parameter.data.copy_(0.4 * values)
    return net


def fold(net, meshes: Meshes):
    """Parameters onto ``tp`` and ``(ep, etp)``, and the collectives that they need."""
    tp, inner = meshes.dense["tp"], meshes.expert["ep", "etp"]
    for block in net.layers.values():
        if tp.size() > 1:
            block.tp = tp
            _place(block.up, "weight", tp, [Shard(0)])
            _place(block.down, "weight", tp, [Shard(1)])
            _place(block.gate, "weight", tp, [Replicate()])
        block.experts.group = meshes.dispatch.get_group()
        _place(block.experts, "w1", inner, [Shard(0), Shard(1)])
        _place(block.experts, "w2", inner, [Shard(0), Shard(2)])
        block.experts.first = local_box(block.experts.w1)[0][0]
    return net


def _place(module, name, mesh, placements):
    whole = getattr(module, name).data
    placed = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    setattr(module, name, nn.Parameter(placed))


def shard(net, meshes: Meshes, **kwargs):
    experts = [block.experts for block in net.layers.values()]
    return apply_fsdp(net, meshes.dense_fsdp, experts_mesh=meshes.expert_fsdp, experts=experts, **kwargs)


def layout(**degrees) -> Meshes:
    """``layout(tp=2, ep=4)``: meshes by short names."""
    names = {
        "dpr": "data_parallel_replicate_degree",
        "dps": "data_parallel_shard_degree",
        "tp": "tensor_parallel_degree",
        "cp": "context_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "ep": "expert_parallel_degree",
        "etp": "expert_tensor_parallel_degree",
    }
    return build_meshes(Parallelism(**{names[name]: value for name, value in degrees.items()}))


def batch():
    """Rows with a different number of valid labels each: a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, : row % LENGTH] = -100
    return ids, labels


def loss_of(net, ids, labels):
    """This micro-batch's share of the global loss."""
    losses = nn.functional.cross_entropy(net(ids), labels.flatten(), ignore_index=-100, reduction="sum")
    return losses / (batch()[1] != -100).sum()


def dp_rows(meshes: Meshes):
    """The rows of this rank; tp ranks share theirs."""
    dense, _ = meshes.degrees.coordinates(dist.get_rank())
    index = (dense["dp_replicate"] * meshes.degrees.dp_shard + dense["dp_shard"]) * meshes.degrees.cp + dense["cp"]
    return slice(index, None, meshes.degrees.dp_replicate * meshes.degrees.dp_shard * meshes.degrees.cp)


def part_of(whole, like):
    """The slice of ``whole`` that this rank's part of ``like`` is."""
    if not isinstance(like, DTensor):
        return whole
    offsets, sizes = local_box(like)
    return whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
