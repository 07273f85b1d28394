"""What the dispatchers over ``deep_ep`` ask of the package, beside the parity of ``test_dispatchers.py``."""

import gc
import subprocess
import sys
import weakref
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from moe_parity import build, data, run, spread, use_double

from titan_moe.errors import ConfigError
from titan_moe.moe.dispatch import GROUP_DISPATCHERS, load_deep_ep

FLEX = ["deepep", "hybridep"]


@pytest.mark.parametrize("name", FLEX)
def test_missing_package_is_named_with_the_way_out(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ConfigError, match=r"needs the package deep_ep .*titan-moe doctor.*'alltoall'"):
        load_deep_ep(name)


def test_package_built_without_hybrid_ep_is_named(monkeypatch):
    package = ModuleType("deep_ep")
    package.Buffer = object
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    assert load_deep_ep("deepep") is package
    with pytest.raises(ConfigError, match=r"deep_ep\.HybridEPBuffer.*titan-moe doctor"):
        load_deep_ep("hybridep")


def test_package_is_imported_only_when_used():
    command = "import sys, titan_moe.moe.dispatch; sys.exit('deep_ep' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def buffers(name):
    """Buffers made by two layers of one width, by a wider one, and by the first again."""
    package = use_double()
    kind = {"deepep": package.Buffer, "hybridep": package.HybridEPBuffer}[name]
    kind.made = 0
    made = []
    for dim in (6, 6, 10, 6):
        layer = spread(build(dim=dim), name)
        run(layer, *(t.chunk(2, 1)[dist.get_rank()] for t in data(1, 6, dim)))
        made.append(kind.made)
    return made


def test_layers_of_a_group_share_one_buffer(run_ranks):
    # DeepEP's holds rows of a fixed size, HybridEP's grows by itself.
    assert run_ranks(2, buffers, "deepep") == [[1, 1, 2, 2]] * 2
    assert run_ranks(2, buffers, "hybridep") == [[1, 1, 1, 1]] * 2


def held_after_a_layer(name):
    use_double()
    layer = spread(build(dim=6), name)
    run(layer, *(t.chunk(2, 1)[dist.get_rank()] for t in data(1, 6, 6)))
    held = layer.dispatcher.buffers[name]
    buffer = weakref.ref(held[1] if name == "deepep" else held)
    del layer, held
    gc.collect()
    return buffer() is None


@pytest.mark.parametrize("name", FLEX)
def test_a_buffer_ends_with_the_last_layer_that_uses_it(run_ranks, name):
    assert run_ranks(2, held_after_a_layer, name) == [True] * 2


def unwaited():
    """Whether results are missing before the stage that waits for them."""
    layer = spread(build(), "deepep")
    x = data(1, 6, 6)[0].chunk(2, 1)[dist.get_rank()][0]
    routing, _ = layer.route(x, None, 1)
    way = layer.dispatcher
    dispatched = way.token_dispatch(way.dispatch_preprocess(x, routing))
    before = dispatched.x.isnan().all().item()
    dispatched = way.dispatch_postprocess(dispatched)
    after = dispatched.x.isnan().any().item()
    y = layer.experts(dispatched.x, dispatched.counts_E, dispatched.weights, dispatched.route_map)
    back = way.token_combine(way.combine_preprocess(y, dispatched), dispatched)
    missing = back.isnan().all().item()
    out = way.combine_postprocess(back, dispatched)
    return before, after, missing, out.isnan().any().item()


def test_transfers_run_until_the_stage_that_waits_for_them(run_ranks):
    assert run_ranks(2, unwaited) == [(True, False, True, False)] * 2


def wide_router(name):
    """bfloat16 tokens with a float64 router."""
    layer = spread(build(torch.bfloat16, router_dtype="float64"), name)
    x, dy = (t.chunk(2, 1)[dist.get_rank()] for t in data(1, 6, 6, torch.bfloat16))
    return run(layer, x, dy)["weights"].dtype


@pytest.mark.parametrize("name", FLEX)
def test_weights_travel_in_fp32_from_a_wider_router(run_ranks, name):
    # The double refuses any other dtype, as the package does.
    assert run_ranks(2, wide_router, name) == [torch.float64] * 2


class _OnGpu:
    is_cuda, dtype = True, torch.float32


@pytest.mark.parametrize("name", FLEX)
def test_other_dtypes_than_bfloat16_are_refused_on_the_gpu(name):
    dispatcher = object.__new__(GROUP_DISPATCHERS[name])
    with pytest.raises(ConfigError, match=rf"'{name}' moves bfloat16 only, not float32.*'alltoall'"):
        dispatcher.dispatch_preprocess(_OnGpu(), None)
