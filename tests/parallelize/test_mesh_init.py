"""Initial weights under FSDP over TP, EP and ETP: every rank's part is one process's, bit by bit."""

from types import SimpleNamespace

import pytest
import torch
from folded_net import layout, part_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe import models
from titan_moe.distributed import local_box
from titan_moe.fsdp_ep import apply_fsdp
from titan_moe.models.init import BLOCK, init_parameters


class Weights(nn.Module):
    """Parameters of several blocks each; ``experts`` go on the expert mesh."""

    def __init__(self, experts):
        super().__init__()
        self.config = SimpleNamespace(init_std=0.02)
        self.experts = nn.Module()
        self.experts.w1 = nn.Parameter(torch.empty(experts, 2, 130, 67))
        self.experts.w2 = nn.Parameter(torch.empty(experts, 67, 130))
        self.experts.b1 = nn.Parameter(torch.empty(experts, 2, 130))
        self.column = nn.Linear(301, 517)
        self.row = nn.Linear(517, 301, bias=False)
        self.norm = nn.RMSNorm(13)
        self.whole = nn.Linear(3, 5, bias=False)


def place(module, name, mesh, placements):
    whole = getattr(module, name).data
    setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


def sharded(degrees, experts):
    """On meta, placed on tp and on (ep, etp), sharded by FSDP over both meshes, then given storage."""
    meshes = layout(**degrees)
    with torch.device("meta"):
        net = Weights(experts)
    tp, inner = meshes.dense["tp"], meshes.expert["ep", "etp"]
    place(net.column, "weight", tp, [Shard(0)])
    place(net.column, "bias", tp, [Shard(0)])
    place(net.row, "weight", tp, [Shard(1)])
    place(net.norm, "weight", tp, [Replicate()])
    place(net.experts, "w1", inner, [Shard(0), Shard(2)])
    place(net.experts, "w2", inner, [Shard(0), Shard(2)])
    place(net.experts, "b1", inner, [Shard(0), Shard(2)])
    apply_fsdp(net, meshes.dense_fsdp, experts_mesh=meshes.expert_fsdp, experts=[net.experts])
    return net.to_empty(device="cpu")


class Draws(TorchDispatchMode):
    """Elements drawn, and the largest tensor that was made on the way."""

    def __init__(self):
        super().__init__()
        self.drawn, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.normal_.default:
            self.drawn += out.numel()
        if function in (torch.ops.aten.empty.memory_format, torch.ops.aten.clone.default):
            self.largest = max(self.largest, out.numel())
        return out


def blocks_touched(parameter):
    offsets, sizes = local_box(parameter)
    flat = torch.arange(parameter.numel()).view(parameter.shape)
    box = flat[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    return len((box // BLOCK).unique())


def compare(degrees, experts):
    """Names of parameters that differ from one process's, and the draws beyond what the parts touch."""
    oracle = Weights(experts)
    init_parameters(oracle, seed=3)
    net = sharded(degrees, experts)
    with Draws() as draws:
        init_parameters(net, seed=3)
    different, elements, touched = [], 0, 0
    for (name, got), (other, want) in zip(net.named_parameters(), oracle.named_parameters(), strict=True):
        assert name == other and isinstance(got, DTensor)
        part = part_of(want.detach(), got)
        elements += part.numel()
        if part.numel() and not torch.equal(got.to_local(), part):
            different.append(name)
        if "norm" not in name and "b" not in name.rpartition(".")[2]:
            touched += blocks_touched(got)
        # What torch itself reassembles is the second witness.
        if not torch.equal(got.full_tensor(), want):
            different.append(f"{name}, reassembled")
    return different, elements, draws.drawn <= touched * BLOCK, draws.largest


@pytest.mark.parametrize(
    "degrees, experts",
    [
        ({"ep": 8}, 8),
        ({"ep": 2}, 9),
        ({"ep": 2, "tp": 2}, 9),
        ({"ep": 4, "tp": 4}, 7),
        ({"ep": 2, "etp": 2, "tp": 2}, 5),
        ({"dpr": 2, "ep": 2, "tp": 2}, 3),
        ({"etp": 2, "tp": 8}, 3),
        ({"pp": 2, "ep": 2, "tp": 2}, 9),
    ],
    ids=str,
)
def test_every_rank_draws_its_part_of_one_process_s_weights(run_ranks, degrees, experts):
    results = run_ranks(8, compare, degrees, experts)
    for different, _, only_touched, largest in results:
        assert not different and only_touched and largest <= BLOCK
    total = sum(parameter.numel() for parameter in Weights(experts).parameters())
    copies = sum(elements for _, elements, _, _ in results) / total
    # No rank left out: all parts together are at least the model.
    assert copies >= degrees.get("pp", 1)


@pytest.mark.parametrize("kept", [("0", "1"), ("2",), ()])
def test_a_pipeline_stage_draws_the_weights_of_the_whole_model(kept):
    whole = models.build("deepseek_v3", "debug", dim=32, hidden_dim=16, vocab_size=32, seed=4)
    with torch.device("meta"):
        stage = models.build("deepseek_v3", "debug", dim=32, hidden_dim=16, vocab_size=32)
    for name in list(stage.layers):
        if name not in kept:
            del stage.layers[name]
    stage.embed_tokens = None
    stage.to_empty(device="cpu")
    init_parameters(stage, seed=4)
    expected = dict(whole.named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, expected[name]), name
