"""A plugin that changes nothing is an error, unless another pipeline stage had what it looks for."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_moe.config import JobConfig
from titan_moe.errors import MatchedNothing
from titan_moe.plugins import Application, PluginContext
from titan_moe.plugins.recompute import PLUGIN


def layers(count):
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    return module


def apply(*counts):
    """Recompute on parts of a model with that many layers each; the message where it is refused."""
    application = Application([PLUGIN], PluginContext(config=JobConfig(), device=torch.device("cpu")))
    parts = [application.apply(layers(count)) for count in counts]
    try:
        application.finish()
    except MatchedNothing as error:
        return str(error)
    return [[layer.forward.__class__.__name__ for layer in part.layers] for part in parts]


def on_ranks(counts):
    return apply(*counts[dist.get_rank()])


def test_one_part_with_layers_is_enough():
    assert apply(0, 2) == apply(2, 0)[::-1] == [[], ["partial", "partial"]]


def test_fault_21_a_plugin_that_matched_nothing_is_refused():
    assert apply(0).startswith("plugin 'recompute' matched nothing in any stage")
    with pytest.raises(MatchedNothing):
        PLUGIN.apply(layers(0), PluginContext(config=JobConfig(), device=torch.device("cpu")))


def test_stages_of_all_ranks_count(run_ranks):
    assert run_ranks(2, on_ranks, [(0,), (1,)]) == [[[]], [["partial"]]]
    refused = run_ranks(2, on_ranks, [(0, 0), (0,)])
    assert refused[0] == refused[1] and "matched nothing" in refused[0]
