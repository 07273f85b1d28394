"""A layer over ranks with a bound on received rows asks the host for nothing: fake tensors have no values to read."""

import pytest
import torch
import torch.distributed as dist
from interpreter import backend
from test_layer import CASES
from test_triton_layer import NoCopies
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_moe.kernels.launch import observed
from titan_moe.moe import MoE, MoEConfig
from titan_moe.moe.dispatch import build_dispatcher

RANKS = 4


def by_operators(tensor, index):
    """``tensor[index]``; torch's own asks for the device's guard, which a CPU build has none of."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [None if isinstance(i, torch.Tensor) else i for i in index]:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (tensor.dim() - sum(i is not None for i in index) + 1)
    dim, gathered = 0, [None] * tensor.dim()
    for i in index:
        if isinstance(i, torch.Tensor):
            gathered[dim] = i
        elif i is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(i, int):
            tensor, dim = tensor.select(dim, i), dim - 1
        else:
            assert i.step is None
            end = tensor.shape[dim] if i.stop is None else i.stop
            tensor = torch.ops.aten.slice(tensor, dim, i.start or 0, end)
        dim += 1
    return torch.ops.aten.index(tensor, gathered) if any(i is not None for i in gathered) else tensor


@pytest.fixture
def group(monkeypatch):
    """A group of four ranks whose collectives leave what they would fill as it is."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None, raising=False)
    yield dist.group.WORLD
    dist.destroy_process_group()


def build(dispatcher, group, factor, device, **fields):
    """A layer of fake tensors with the experts of one rank."""
    config = MoEConfig(**{"dim": 64, "hidden_dim": 48, "num_experts": 8, "top_k": 2, **fields})
    with torch.device("meta"):
        layer = MoE(config)
    layer.dispatcher = build_dispatcher(dispatcher, num_experts=8, ep_group=group, recv_capacity_factor=factor)
    for module in layer.modules():
        for held in (module._parameters, module._buffers):
            for key, t in held.items():
                if t is not None:
                    shape = (8 // RANKS, *t.shape[1:]) if module is layer.experts else t.shape
                    new = torch.empty(shape, dtype=t.dtype, device=device)
                    held[key] = torch.nn.Parameter(new) if held is module._parameters else new
    return layer


VARIANTS = ["softmax_post", "sigmoid_bias_groups", "gpt_oss", "llama4", "all_losses", "latent"]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("name", VARIANTS)
def test_forward_on_fake_cuda_tensors(group, monkeypatch, name, dispatcher):
    monkeypatch.setattr(torch.Tensor, "__getitem__", by_operators)
    launches = []
    with FakeTensorMode(), torch.no_grad(), NoCopies(), backend("auto"):
        layer = build(dispatcher, group, 1.25, "cuda", **CASES[name])
        with observed(lambda kernel, *_: launches.append(kernel.__name__)):
            y = layer(torch.empty(2, 9, 64, device="cuda"))
    assert y.shape == (2, 9, 64) and y.device.type == "cuda"
    assert layer.dispatcher.overflow.device.type == "cuda" and "_gather_up_kernel" in launches


@pytest.mark.parametrize("which", ["torch", "triton"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_both_passes_on_fake_tensors(group, dispatcher, which):
    """On the CPU, since torch's engine runs no backward pass on devices that are not there."""
    with FakeTensorMode(), backend(which):
        layer = build(dispatcher, group, 1.25, "cpu", **CASES["all_losses"])
        x = torch.empty(2, 9, 64, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_without_a_bound_the_host_is_asked(group, monkeypatch, dispatcher):
    monkeypatch.setattr(torch.Tensor, "__getitem__", by_operators)
    with FakeTensorMode(), torch.no_grad(), backend("auto"):
        layer = build(dispatcher, group, None, "cuda")
        assert layer.dispatcher.host_syncs == 1
        with pytest.raises(DataDependentOutputException):
            layer(torch.empty(2, 9, 64, device="cuda"))
