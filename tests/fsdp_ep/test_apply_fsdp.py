"""Data parallel against one process: every gradient, on every rank, is the sum over the global batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError
from titan_moe.fsdp_ep import apply_fsdp, find_blocks
from titan_moe.parallelize import build_meshes


def mesh_over(replicate=1):
    return build_meshes(Parallelism(data_parallel_replicate_degree=replicate)).dense_fsdp


class Gate(nn.Module):
    """A router's stand-in: multiplies by a weight kept in fp32 or more, whatever the model's dtype."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dim))

    def forward(self, x):
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        self.seen = self.weight.dtype
        return torch.softmax(x.to(wide) @ self.weight.to(wide).T, -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate = Gate(dim)
        self.up = nn.Linear(dim, 7)
        self.down = nn.Linear(12, dim)
        self.rare = nn.Linear(dim, dim)

    def forward(self, x, use_rare):
        y = x + self.down(torch.cat([torch.tanh(self.up(x)), self.gate(x)], -1))
        return y + self.rare(x) if use_rare else y


class Net(nn.Module):
    def __init__(self, dim=6, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.body = nn.Module()
        self.body.layers = nn.ModuleDict({str(i): Block(dim) for i in range(blocks)})
        self.head = nn.Linear(dim, 11)

    def forward(self, ids, use_rare=True):
        x = self.embed(ids)
        for layer in self.body.layers.values():
            x = layer(x, use_rare)
        return self.head(x)


def make_net(dtype=torch.float64):
    torch.manual_seed(1)
    net = Net().to(dtype)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net


def token_losses(net, ids, labels, use_rare=True):
    logits = net(ids, use_rare)
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def batch(rows=8):
    """Eight sequences with a different number of valid labels each: a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(11, (rows, 9), generator=generator)
    labels = torch.randint(11, (rows, 9), generator=generator)
    for row in range(rows):
        labels[row, : row % 7] = -100
    return ids, labels


def max_gradient_errors(replicate, rare_ranks=None, micro_batches=1, reshard=True):
    """Largest difference of each parameter's local gradient to the same slice of one process's gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    uses_rare = [rare_ranks is None or r in rare_ranks for r in range(world)]
    ids, labels = batch()
    valid = (labels != -100).sum()
    oracle = make_net()
    for r in range(world):
        loss = token_losses(oracle, ids[r::world], labels[r::world], uses_rare[r])
        (loss / valid).backward()

    mesh = mesh_over(replicate)
    net = apply_fsdp(make_net(), mesh, reshard_after_forward=reshard)
    for part in torch.arange(rank, len(ids), world).chunk(micro_batches):
        (token_losses(net, ids[part], labels[part], uses_rare[rank]) / valid).backward()
    errors = {}
    for (name, got), (other, want) in zip(net.named_parameters(), oracle.named_parameters(), strict=True):
        assert name == other and isinstance(got, DTensor)
        placed = distribute_tensor(want.grad, mesh, got.placements, src_data_rank=None)
        difference = got.grad.to_local() - placed.to_local()
        errors[name] = difference.abs().max().item() if difference.numel() else 0.0
    return errors


def fsdp_state():
    net = apply_fsdp(make_net(), mesh_over(2))
    groups = {}
    for name, module in net.named_modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                groups[name] = (group.gradient_divide_factor, group.force_sum_reduction_for_comms)
    return groups


def router_in_fp32(compute_dtype):
    """Dtypes of a bf16 or mixed model with an fp32 gate: gate's group or not, parameter, compute, gradient."""
    net = make_net(torch.bfloat16 if compute_dtype is None else torch.float32)
    for layer in net.body.layers.values():
        layer.gate.float()
    apply_fsdp(net, mesh_over(), compute_dtype=compute_dtype, keep_precision=(Gate,))
    ids, labels = batch(2)
    logits = net(ids)
    token_losses(net, ids, labels).backward()
    layer = net.body.layers["0"]
    grads = (layer.gate.weight.grad.dtype, layer.up.weight.grad.dtype)
    return isinstance(layer.gate, FSDPModule), layer.gate.seen, logits.dtype, grads


def mixed_module():
    net = make_net(torch.bfloat16)
    net.head.bias.data = net.head.bias.data.float()
    with pytest.raises(ConfigError, match=r"Linear holds parameters of torch.bfloat16, torch.float32"):
        apply_fsdp(net, mesh_over())


@pytest.mark.parametrize("ranks, replicate", [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2)])
def test_gradients_are_sums_over_the_global_batch(run_ranks, ranks, replicate):
    for errors in run_ranks(ranks, max_gradient_errors, replicate):
        assert len(errors) == 17 and max(errors.values()) < 1e-10, errors


def test_gradients_do_not_depend_on_micro_batches_or_resharding(run_ranks):
    for errors in run_ranks(2, max_gradient_errors, 1, None, 2, False):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_parameter_unused_on_some_ranks_keeps_the_others_gradient(run_ranks, replicate):
    for errors in run_ranks(2, max_gradient_errors, replicate, (1,)):
        assert max(errors.values()) < 1e-10, errors


def test_no_group_keeps_the_default_divide_factor(run_ranks):
    for groups in run_ranks(2, fsdp_state):
        assert groups == dict.fromkeys(("", "body.layers.0", "body.layers.1"), (1.0, True))


def test_fp32_router_in_a_bf16_model_is_a_group_of_its_own(run_ranks):
    for own_group, seen, logits, (gate, up) in run_ranks(2, router_in_fp32, None):
        assert own_group and seen == torch.float32 and logits == torch.bfloat16
        assert (gate, up) == (torch.float32, torch.bfloat16)


def test_mixed_precision_keeps_the_router_in_fp32_and_the_gradients_in_the_parameters_dtype(run_ranks):
    for own_group, seen, logits, (gate, up) in run_ranks(2, router_in_fp32, torch.bfloat16):
        assert own_group and seen == torch.float32 and logits == torch.bfloat16
        assert (gate, up) == (torch.float32, torch.float32)


def test_two_dtypes_in_one_module_are_refused(run_ranks):
    run_ranks(2, mixed_module)


def test_blocks_are_the_elements_of_the_outermost_containers():
    net = Net()
    net.body.layers["0"].inner = nn.ModuleList([nn.Linear(2, 2)])
    net.empty = nn.ModuleList([nn.Identity()])
    assert find_blocks(net) == list(net.body.layers.values())


def copies_on_both_sides_of_an_uneven_cut():
    """The norm's gradient on this rank; the other parameter is what an uneven tp cut leaves to it."""
    meshes = build_meshes(Parallelism(tensor_parallel_degree=2))
    place = meshes.dense.get_coordinate()
    tp_rank, dp_rank = place[-1], place[2]
    model = nn.Module()
    model.norm = nn.Parameter(torch.zeros(4096))
    model.cut = nn.Parameter(torch.zeros(6000 + 1700 * tp_rank))
    model.forward = lambda x: (model.norm * x).sum() + model.cut.sum()
    apply_fsdp(model, meshes.dense_fsdp)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(dp_rank))
    model(x).backward()
    grad = model.norm.grad.full_tensor()
    want = sum(torch.randn(4096, generator=torch.Generator().manual_seed(r)).double() for r in range(4))
    torch.testing.assert_close(grad.double(), want, rtol=0, atol=4 * 2**-23 * want.abs().max().item())
    return grad


def test_what_tp_ranks_replicate_gets_one_gradient_though_an_uneven_cut_gives_them_other_buffers(run_ranks):
    first, *others = run_ranks(8, copies_on_both_sides_of_an_uneven_cut)
    assert all(torch.equal(first, other) for other in others)
