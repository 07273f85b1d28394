"""Mode ``selective``: which operators are kept, for how long, and what is refused."""

import gc
import weakref

import pytest
import torch
from test_recompute import assert_equal, batch, build, flops, job, plain, size_of, trained  # noqa: F401
from torch import Tensor, nn

from titan_moe.errors import ConfigError, TrainingError
from titan_moe.plugins import chosen
from titan_moe.plugins.recompute import costly_operators, recompute_layers


def test_kept_operators_stand_beside_what_is_looked_up_in_the_second_run(plain):  # noqa: F811
    # The sum over micro-batches of the global loss is made in the first run only.
    model = build("qwen3_moe", global_aux_loss_coef=0.1)
    recompute_layers(model, costly_operators())
    assert_equal(trained(model), plain("qwen3_moe", global_aux_loss_coef=0.1))


def test_kept_operators_are_not_run_again():
    counts = {}
    for name, context_fn in {"none": "none", "full": None, "selective": costly_operators()}.items():
        model = build("qwen3_moe")
        if context_fn != "none":
            recompute_layers(model, context_fn)
        counts[name] = flops(model)
    # Of each layer's products beside the experts', which run again, every second is kept; so is attention.
    assert counts["none"] < counts["selective"] < counts["full"]
    kept = counts["full"] - counts["selective"]
    tokens, layers = batch(build("qwen3_moe"))[0].numel(), 3
    # Queries, values, the router, and of the four products of attention that are counted, two.
    assert kept >= layers * 2 * tokens * 32 * (4 * 16 + 2 * 16)


def test_a_kept_result_that_is_changed_in_place_is_named():
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).add_(1)).exp()

    net = nn.Module()
    net.layers = nn.ModuleList([Changing()])
    recompute_layers(net, costly_operators())
    out = net.layers[0](torch.randn(4, 8))
    with pytest.raises(TrainingError, match="'selective' keeps was changed in place"):
        out.sum().backward()


def test_what_is_kept_goes_with_the_graph():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
            self.seen: list[list[weakref.ref]] = []

        def forward(self, x: Tensor) -> Tensor:
            made = self.one(x), self.two(self.one(x).sin()).cos()
            self.seen.append([weakref.ref(one.untyped_storage()) for one in made])
            return made[0].mean() + made[1]

    net = nn.Module()
    net.layers = nn.ModuleList([Block()])
    recompute_layers(net, costly_operators())
    gc.disable()
    try:
        for backward in (True, False):
            out = net.layers[0](torch.randn(4, 8, requires_grad=True))
            # The first product is kept, but not what is made of the third.
            assert [size_of(storage) for storage in net.layers[0].seen[-1]] == [4 * 16 * 4, 0]
            if backward:
                out.sum().backward()
            del out
            assert all(size_of(storage) == 0 for run in net.layers[0].seen for storage in run)
    finally:
        gc.enable()


def test_kept_operators_are_refused_where_none_is_called(tmp_path):
    config = job("selective", compile={"enable": True}, job={"dump_folder": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"'selective' with compile\.enable"):
        chosen(config)
