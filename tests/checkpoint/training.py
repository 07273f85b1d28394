"""A small training run for the checkpoint tests: data, noise and state from a seed, on any number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_moe.config.job import Optimizer, Parallelism
from titan_moe.distributed import rank, world_size
from titan_moe.fsdp_ep import apply_fsdp
from titan_moe.optim import build_optimizer, clip_grad_norm
from titan_moe.parallelize import build_meshes


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(3, 2, 5, dim))
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("expert_bias", torch.zeros(3))

    def forward(self, x):
        return self.norm(x + torch.einsum("td,enfd->td", x, self.w1 * (1 + self.expert_bias.sum())))


class Net(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.embed = nn.Embedding(7, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(2)})
        self.head = nn.Linear(dim, 7, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("positions", torch.arange(4), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def network(seed=1, dtype=torch.float64):
    """A fresh model with random weights."""
    torch.manual_seed(seed)
    model = Net().to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def start(seed=1, replicate=1, dtype=torch.float64):
    """A fresh model and optimizer; FSDP over all ranks when there is a group."""
    model = network(seed, dtype)
    if dist.is_initialized():
        apply_fsdp(model, build_meshes(Parallelism(data_parallel_replicate_degree=replicate)).dense_fsdp)
    return model, build_optimizer(model, Optimizer(lr=0.02))


def train(model, optimizer, steps):
    """Optimizer steps with data that depends on the step, noise from the RNG and an updated buffer."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(7, (8, 2), generator=generator)[rank() :: world_size()]
        loss = nn.functional.cross_entropy(model(ids[:, 0]), ids[:, 1], reduction="sum") / 8
        loss = loss * (1 + 0.1 * torch.rand(()))
        loss.backward()
        clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for layer in model.layers.values():
            layer.expert_bias += 0.01 * step


def full_state(model, optimizer):
    """Every parameter, buffer and optimizer tensor, whole, by name."""
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = value
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def differences(one, other):
    """Names whose tensors are not bitwise equal, or that only one side has."""
    return [name for name in one.keys() | other.keys() if not same(one.get(name), other.get(name))]


def same(one, other):
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
