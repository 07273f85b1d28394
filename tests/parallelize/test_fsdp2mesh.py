"""FSDP on two meshes: experts over ``edp_shard``, the rest over ``dp_shard x cp``, each equal to one process."""

import pytest
import torch
import torch.distributed as dist
from collectives import recorded
from folded_net import Net, batch, dp_rows, fill, fold, layout, loss_of, part_of, shard
from torch.distributed.fsdp import FSDPModule

from titan_moe.optim import clip_grad_norm

# Every kind: experts folded over dp and over tp, EP beyond DP, ETP, HSDP on one and both meshes, nothing sharded.
LAYOUTS = [
    {"dps": 8, "ep": 8},
    {"dps": 8, "ep": 2},
    {"dps": 8},
    {"tp": 2, "ep": 4},
    {"tp": 2, "ep": 8},
    {"tp": 4, "ep": 8},
    {"tp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "etp": 4},
    {"dpr": 2, "ep": 2},
    {"dpr": 2, "tp": 2, "ep": 2, "etp": 2},
    {"dpr": 8, "ep": 8},
    {"dpr": 2, "tp": 4},
]


def folded_errors(degrees, experts, reshard, micro_batches):
    """Largest relative difference of each local gradient to the same slice of one process's, and the norms."""
    ids, labels = batch()
    oracle = fill(Net(experts))
    loss_of(oracle, ids, labels).backward()
    meshes = layout(**degrees)
    net = shard(fold(fill(Net(experts)), meshes), meshes, reshard_after_forward=reshard)
    rows = dp_rows(meshes)
    for own_ids, own_labels in zip(ids[rows].chunk(micro_batches), labels[rows].chunk(micro_batches), strict=True):
        loss_of(net, own_ids, own_labels).backward()
    errors = {}
    for (name, got), (other, want) in zip(net.named_parameters(), oracle.named_parameters(), strict=True):
        assert name == other
        difference = got.grad.to_local() - part_of(want.grad, got)
        errors[name] = (difference.abs().max() / want.grad.abs().max()).item() if difference.numel() else 0.0
    norm = clip_grad_norm(net.parameters(), 0.01)
    want = clip_grad_norm_of_one(oracle)
    errors["norm"] = abs(norm.item() / want.item() - 1)
    for got, oracle_parameter in zip(net.parameters(), oracle.parameters(), strict=True):
        clipped = part_of(oracle_parameter.grad * (0.01 / (want + 1e-6)), got)
        torch.testing.assert_close(got.grad.to_local(), clipped, rtol=1e-9, atol=1e-13)
    return errors


def clip_grad_norm_of_one(net):
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).norm()


def group_settings(degrees):
    meshes = layout(**degrees)
    net = shard(fold(Net(), meshes), meshes)
    settings = {}
    for name, module in net.named_modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                settings[name] = (group.gradient_divide_factor, group.force_sum_reduction_for_comms)
    return settings


def collectives(degrees):
    """What FSDP issued in one step, with the dense compute of each block between: ``(event, ranks, elements)``."""
    meshes = layout(**degrees)
    net = shard(fold(fill(Net()), meshes), meshes)
    ids, labels = batch()
    rows = dp_rows(meshes)
    with recorded() as issued:
        for name, block in net.layers.items():
            block.dense = computing(block.dense, name, issued)
        loss_of(net, ids[rows], labels[rows]).backward()
    block = net.layers["0"]
    elements = {
        "experts": sum(p.to_local().numel() for p in block.experts.parameters()),
        "block": sum(p.to_local().numel() for n, p in block.named_parameters() if "experts" not in n),
        "root": sum(p.to_local().numel() for p in (*net.embed.parameters(), *net.head.parameters())),
    }
    groups = (meshes.expert["edp_shard"], meshes.dense_fsdp["fsdp"])
    return issued, elements, *(tuple(dist.get_process_group_ranks(mesh.get_group())) for mesh in groups)


def computing(dense, name, issued):
    """``dense``, noting when its forward and its backward pass run."""

    def call(x):
        issued.append((f"forward {name}", (), 0))
        y = dense(x)
        y.register_hook(lambda grad: issued.append((f"backward {name}", (), 0)))
        return y

    return call


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_gradients_and_norm_are_one_process_s(run_ranks, degrees):
    for errors in run_ranks(8, folded_errors, degrees, 8, True, 1):
        assert len(errors) == 16 and max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(
    "experts, degrees", [(9, {"ep": 2}), (7, {"tp": 2, "ep": 4}), (5, {"dpr": 2, "ep": 2})], ids=str
)
def test_experts_that_do_not_divide(run_ranks, experts, degrees):
    for errors in run_ranks(8, folded_errors, degrees, experts, True, 1):
        assert max(errors.values()) < 1e-10, errors


def test_micro_batches_and_kept_parameters_change_nothing(run_ranks):
    for errors in run_ranks(8, folded_errors, {"tp": 2, "ep": 4}, 8, False, 2):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("degrees", [{"tp": 2, "ep": 4}, {"dpr": 2, "ep": 4}, {"dpr": 8, "ep": 8}], ids=str)
def test_no_group_keeps_a_default_reduction(run_ranks, degrees):
    names = ["", "layers.0", "layers.0.experts", "layers.1", "layers.1.experts"]
    for settings in run_ranks(8, group_settings, degrees):
        assert settings == dict.fromkeys(names, (1.0, True))


def test_experts_are_gathered_only_inside_their_edp_shard_group(run_ranks):
    results = run_ranks(8, collectives, {"tp": 2, "ep": 4})
    # The first rank's parts are the longest, to which those of the others are padded.
    _, padded, _, _ = results[0]
    assert len(set(padded.values())) == 3
    for issued, elements, expert_ranks, dense_ranks in results:
        assert len(expert_ranks) == 2 and len(dense_ranks) == 4
        sent = [entry for entry in issued if entry[1]]
        # Two layers, gathered forward and backward.
        experts = 4 * [("gather", expert_ranks, elements["experts"])] + 2 * [
            ("scatter", expert_ranks, elements["experts"])
        ]
        assert sorted(entry for entry in sent if entry[1] == expert_ranks) == experts
        others = [entry for entry in sent if entry[1] != expert_ranks]
        dense = {(name, dense_ranks, padded[part]) for name in ("gather", "scatter") for part in ("block", "root")}
        assert set(others) == dense


def test_experts_are_gathered_before_the_attention_that_hides_it(run_ranks):
    for issued, _, expert_ranks, _ in run_ranks(8, collectives, {"tp": 2, "ep": 4}):
        events = [
            name if not ranks else "experts"
            for name, ranks, _ in issued
            if not ranks or (name == "gather" and ranks == expert_ranks)
        ]
        assert events == [
            "experts",
            "forward 0",
            "experts",
            "forward 1",
            "experts",
            "experts",
            "backward 1",
            "backward 0",
        ]
