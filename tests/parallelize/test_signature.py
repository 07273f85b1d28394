"""Ranks that are about to do different things find out, are named, and say what differs."""

import time

import pytest
import torch
import torch.distributed as dist
from folded_net import Net, fold, layout, shard
from torch import nn

from titan_moe.config import JobConfig
from titan_moe.errors import TrainingError
from titan_moe.parallelize.signature import check_signature, signature_of_config, signature_of_parameters


def check(what, entries, timeout=20.0, group=0):
    """The message of the check on this rank, or None."""
    try:
        check_signature(what, entries, group=group, timeout_seconds=timeout)
    except TrainingError as error:
        return str(error)
    return None


def config_on(odd_ranks):
    config = JobConfig()
    config.job.description = f"rank {dist.get_rank()}"
    if dist.get_rank() in odd_ranks:
        config.optimizer.lr = 0.5
        config.model.override = {"num_experts": 16}
    return config


def differing_config(odd_ranks):
    return check("configuration", signature_of_config(config_on(odd_ranks)))


def differing_degrees_before_any_mesh():
    """Without the check these ranks would wait for each other in different groups."""
    config = JobConfig()
    config.parallelism.tensor_parallel_degree = 2 if dist.get_rank() == 1 else 1
    return check("configuration", signature_of_config(config))


def several_kinds():
    return check("configuration", {"a": str(dist.get_rank() // 2), "b": "same"})


def differing_parameters(kind):
    """Stages hold different parameters by right; rank 3 differs within the second stage."""
    meshes = layout(pp=2)
    stage = meshes.dense["pp"].get_local_rank()
    net = nn.ModuleDict({f"layer{stage}": nn.Linear(4, 3 + stage)})
    if dist.get_rank() == 3 and kind == "name":
        net["extra"] = nn.Linear(2, 2, bias=False)
    if dist.get_rank() == 3 and kind == "shape":
        net["layer1"] = nn.Linear(4, 5)
    if dist.get_rank() == 3 and kind == "dtype":
        net.to(torch.bfloat16)
    if dist.get_rank() == 3 and kind == "frozen":
        net["layer1"].bias.requires_grad_(False)
    return check("parameters", signature_of_parameters(net.named_parameters()), group=stage)


def sharded_alike():
    """Parts differ between ranks, what they are parts of does not."""
    meshes = layout(tp=2, ep=2)
    net = shard(fold(Net(7), meshes), meshes)
    entries = signature_of_parameters(net.named_parameters())
    assert "fsdp 2 x tp 2" in entries["layers.0.up.weight"]
    return check("parameters", entries), check("parameters", entries)


def a_rank_that_never_comes():
    if dist.get_rank() == 2:
        time.sleep(3)
        return None
    return check("configuration", {"a": "1"}, timeout=1.0)


def without_rank_0():
    if dist.get_rank() == 0:
        time.sleep(3)
        return None
    return check("configuration", {"a": "1"}, timeout=1.0)


def test_equal_ranks_pass_and_descriptions_may_differ(run_ranks):
    assert run_ranks(4, differing_config, ()) == [None] * 4


def test_a_rank_with_another_configuration_is_named_with_the_keys(run_ranks):
    messages = run_ranks(8, differing_config, (5,))
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 5 differs from the others in its configuration: on rank 5 (")
    assert "optimizer.lr is 0.5, not 0.0008" in messages[0]
    assert "model.override is {'num_experts': 16}, not {}" in messages[0] and "rank 0" in messages[0]


def test_the_majority_is_right_even_without_rank_0(run_ranks):
    (message,) = set(run_ranks(4, differing_config, (0,)))
    assert message.startswith("rank 0 differs from the others in its configuration") and "as on rank 1" in message


def test_several_ranks_of_one_kind_are_listed_and_shown_once(run_ranks):
    (message,) = set(run_ranks(8, differing_config, (1, 4, 6)))
    assert (
        message.startswith("ranks 1, 4, 6 differ from the others in their configuration")
        and message.count("optimizer.lr") == 1
    )


def test_every_kind_is_shown(run_ranks):
    (message,) = set(run_ranks(6, several_kinds))
    assert "ranks 2, 3, 4, 5" in message and "a is 1, not 0" in message and "a is 2, not 0" in message
    assert "b is" not in message


def test_degrees_that_differ_are_found_before_any_group_is_made(run_ranks):
    (message,) = set(run_ranks(2, differing_degrees_before_any_mesh))
    assert "parallelism.tensor_parallel_degree is 2, not 1" in message


@pytest.mark.parametrize(
    "kind, says",
    [
        ("name", "extra.weight is [2, 2] float32, not absent"),
        ("shape", "layer1.weight is [5, 4] float32, not [4, 4] float32"),
        ("dtype", "layer1.bias is [4] bfloat16, not [4] float32"),
        ("frozen", "layer1.bias is [4] float32, frozen, not [4] float32"),
    ],
)
def test_parameters_are_compared_within_a_pipeline_stage(run_ranks, kind, says):
    (message,) = set(run_ranks(4, differing_parameters, kind))
    assert message.startswith("rank 3 differs from the others in its parameters") and says in message


def test_stages_with_different_parameters_pass(run_ranks):
    assert run_ranks(4, differing_parameters, None) == [None] * 4


def test_uneven_parts_of_equal_parameters_pass_again_and_again(run_ranks):
    assert run_ranks(4, sharded_alike) == [(None, None)] * 4


def test_a_rank_that_does_not_come_is_named(run_ranks):
    messages = run_ranks(4, a_rank_that_never_comes)
    assert messages[2] is None
    assert all("rank 2 did not come to compare the configuration within 1 s" in messages[r] for r in (0, 1, 3))


def test_a_silent_rank_0_is_named(run_ranks):
    messages = run_ranks(2, without_rank_0)
    assert messages[0] is None and "rank 0 did not compare the ranks' configuration within 2 s" in messages[1]


def test_one_process_needs_no_peers():
    check_signature("configuration", {"a": "1"}, timeout_seconds=0.1)
