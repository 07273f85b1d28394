"""Offload: values, what leaves and returns and in which order, what is on the device meanwhile, and who waits."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from test_recompute import OF_FAMILY, assert_close, assert_equal, batch, build, compiled, named, plain, trained  # noqa: F401
from torch import Tensor, nn

from titan_moe.config import from_dict, validate
from titan_moe.errors import ConfigError
from titan_moe.models import token_losses
from titan_moe.observe.memory import TensorTracker, total_bytes
from titan_moe.plugins import chosen
from titan_moe.plugins.offload import OFFLOAD, offload_activations
from titan_moe.plugins.offloader import Offloader
from titan_moe.plugins.recompute import recompute_targets
from titan_moe.plugins.streams import SimulatedCopies
from titan_moe.plugins.targets import find

FINE = ("layernorm", "qk_norm", "mla_up_proj", "moe_act")
TARGETS = (*OFFLOAD, "layers.*", "**.o_proj")
# gpt_oss has neither dense layers nor shared experts.
PAIRS = [("deepseek_v3", target) for target in TARGETS]
PAIRS += [("gpt_oss", target) for target in TARGETS if target not in ("mlp", "shared_expert")]


def offloaded(model: nn.Module, targets, **options) -> Offloader:
    offloader = Offloader(SimulatedCopies(), **options)
    assert offload_activations(model, targets, offloader)
    return offloader


@pytest.mark.parametrize("recompute", [(), FINE, ("moe", "core_attn")], ids=["alone", "fine", "coarse"])
@pytest.mark.parametrize(("family", "target"), PAIRS)
def test_each_target_with_and_without_recompute_changes_no_bit(plain, family, target, recompute):  # noqa: F811
    model = build(family, jitter=0.1)
    recompute_targets(model, named(model, recompute))
    offloader = offloaded(model, [target])
    assert_equal(trained(model), plain(family, jitter=0.1))
    assert offloader.returned + offloader.cancelled <= offloader.left


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("layernorm", "mla_up_proj")], ids=["alone", "fine"])
def test_what_a_compiled_layer_saves_travels_as_a_whole(recompute):
    results = []
    for travels in (False, True):
        model = compiled("aot_eager_decomp_partition")
        recompute_targets(model, recompute)
        offloader = offloaded(model, ["layers.*"]) if travels else None
        results.append(trained(model, passes=2))
    assert_equal(*results)
    # Of three layers the last one's stay; what two layers share, such as tables, is found to and comes back at once.
    assert 0.9 * offloader.left < offloader.returned == offloader.left - offloader.cancelled
    # In units of a layer's input, over two passes.
    assert offloader.left > 2 * 20 * (2 * 70 * 32 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("layernorm", "core_attn")], ids=["alone", "fine"])
def test_parts_of_compiled_layers_let_go_of_the_same_bytes(recompute):
    want = trained(compiled("aot_eager_decomp_partition"), passes=1)
    for target in OFFLOAD:
        left = []
        for model in (build("deepseek_v3", mtp_depth=0), compiled("aot_eager_decomp_partition")):
            recompute_targets(model, recompute)
            offloader = offloaded(model, [target])
            made = trained(model, passes=1)
            left.append((offloader.left, offloader.returned, offloader.cancelled))
        assert_close(made, want)
        if not recompute:
            assert left[0] == left[1], target
        assert left[1][0] > 0 or left[0][0] == 0, target


def test_all_targets_together_change_no_bit(plain):  # noqa: F811
    for family in OF_FAMILY:
        model = build(family, jitter=0.1)
        offloader = offloaded(model, [target for target in OFFLOAD if find(model, [target], OFFLOAD)])
        assert_equal(trained(model), plain(family, jitter=0.1))
        assert offloader.left > 0


def held(model: nn.Module) -> int:
    ids, _ = batch(model)
    with TensorTracker() as tracker:
        outputs = model(ids)
        gc.collect()
        amount = total_bytes(tracker.alive())
    del outputs
    return amount


@pytest.mark.parametrize(("save", "z"), [("preact", 2 * 24 * 4), ("input", 0), ("preact_fp8", 2 * 24 + 4)])
def test_what_a_target_takes_off_the_device_is_what_it_says(save, z):
    # Per token in bytes: queries, keys, values, outputs and the fp32 sums of attention; rows of the experts.
    ids, _ = batch(build("qwen3_moe"))
    tokens, layers_gone = ids.numel(), 3 - 1
    for target, per_token in {
        "core_attn": (4 * 16 + 2 * 16 + 2 * 16 + 4 * 16 + 4) * 4,
        "attn_norm": 32 * 4 + 4,
        "expert_fc1": 32 * 4 + 2 * 4,
        "moe_act": 2 * z + 2 * 2 * 8,
    }.items():
        before = held(build("qwen3_moe", save=save))
        model = build("qwen3_moe", save=save)
        offloader = offloaded(model, [target])
        gone = before - held(model)
        assert gone == offloader.left
        assert gone == pytest.approx(layers_gone * tokens * per_token, rel=0.02), target


@pytest.mark.parametrize("save", ["input", "preact_fp8"])
def test_whatever_the_experts_keep_recompute_and_offload_change_no_bit(plain, save):  # noqa: F811
    model = build("deepseek_v3", jitter=0.1, save=save)
    recompute_targets(model, ["moe_act"])
    offloader = offloaded(model, ["moe_act", "expert_fc1"])
    assert_equal(trained(model), plain("deepseek_v3", jitter=0.1, save=save))
    assert 0 < offloader.returned <= offloader.left


def test_small_tensors_and_a_share_of_the_bytes_stay():
    tokens = batch(build("qwen3_moe", num_layers=9))[0].numel()
    sizes = {}
    for fraction in (1.0, 0.5, 0.25):
        model = build("qwen3_moe", num_layers=9)
        offloader = offloaded(model, ["attn_norm"], fraction=fraction, min_bytes=tokens * 32 * 4)
        trained(model, passes=1)
        sizes[fraction] = offloader.left
        assert offloader.returned == offloader.left
    # Eight layers' inputs, without the small sums.
    assert sizes[1.0] == 8 * tokens * 32 * 4
    assert (sizes[0.5], sizes[0.25]) == (sizes[1.0] / 2, sizes[1.0] / 4)


def test_recompute_decides_what_is_left_to_travel():
    left = []
    for recompute in ((), ("moe_act",)):
        model = build("deepseek_v3", mtp_depth=0)
        recompute_targets(model, recompute)
        # What the shared expert's activation is made from leaves, and what it makes is nowhere.
        offloader = offloaded(model, ["shared_expert"])
        trained(model, passes=1)
        left.append(offloader.left)
        assert offloader.returned == offloader.left
    made = batch(model)[0].numel() * 20 * 4
    assert left[0] - left[1] == made


def test_twenty_steps_keep_no_more_than_one():
    model = build("qwen3_moe")
    recompute_targets(model, ("layernorm", "core_attn"))
    offloader = offloaded(model, ["moe_act", "expert_fc1"])
    ids, labels = batch(model)
    alive, buffers = [], []
    for _ in range(20):
        with TensorTracker() as tracker:
            token_losses(model(ids), labels, None, 0.3).total.backward()
            model.zero_grad()
            alive.append(total_bytes(tracker.alive()))
        buffers.append(sum(map(len, offloader._pool.values())))
    assert len(set(alive[1:])) == 1 and len(set(buffers)) == 1


class Clocked(SimulatedCopies):
    """Keeps weak hold of all that is brought back, and tells what it was by its first element."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.brought: list[weakref.ref] = []
        self.order: list[int] = []

    def device_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = super().device_buffer(numel, dtype)
        self.brought.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    def out(self, source: Tensor, target: Tensor, after) -> object:
        target.label = int(source[0])
        return super().out(source, target, after)

    def back(self, source: Tensor, target: Tensor) -> object:
        self.order.append(source.label)
        return super().back(source, target)


class Work(torch.autograd.Function):
    """Saves its input and as many times as much of its own, and takes its time."""

    @staticmethod
    def forward(ctx, x, module):
        made = torch.full((module.made,), float(x.detach().flatten()[0]))
        ctx.save_for_backward(x, made)
        ctx.module = module
        module.watch(x, made)
        module.copies.compute(module.seconds)
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        x, made = ctx.saved_tensors
        ctx.module.watch()
        assert float(made[0]) == float(x.flatten()[0]) if made.numel() else True
        assert (x == x.flatten()[0]).all()
        ctx.module.copies.compute(2 * ctx.module.seconds)
        return grad * (x.flatten()[0] % 3 + 1), None


class Part(nn.Module):
    def __init__(self, net: "Net", made: int, seconds: float) -> None:
        super().__init__()
        self.copies, self.made, self.seconds, self.watch = net.copies, made, seconds, net.watch

    def forward(self, x: Tensor) -> Tensor:
        return Work.apply(x, self)


class Net(nn.Module):
    """Layers of two parts whose saved tensors are known."""

    def __init__(self, depth: int, copies: Clocked, *, width: int = 64, made: int = 128, seconds: float = 1.0) -> None:
        super().__init__()
        self.copies, self.saved, self.most = copies, [], 0
        self.layers = nn.ModuleList(
            nn.ModuleDict({"first": Part(self, made, seconds), "second": Part(self, 0, seconds)}) for _ in range(depth)
        )
        self.one_layer = 4 * (width + made + width)

    def watch(self, *tensors: Tensor) -> None:
        self.saved += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        alive = {id(s): s for ref in [*self.saved, *self.copies.brought] if (s := ref()) is not None}
        self.most = max(self.most, sum(storage.nbytes() for storage in alive.values()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1  # the caller holds x
        for layer in self.layers:
            x = layer["second"](layer["first"](x))
        return x


TARGETS = ("layers.*.first", "layers.*.second")


def started(width: int = 64, label: float = 0.0) -> Tensor:
    return torch.full((width,), label, requires_grad=True)


@pytest.mark.parametrize("depth", [4, 16, 64])
def test_the_device_holds_one_layer_whatever_the_depth(depth):
    copies = Clocked(bytes_per_second=1e3)
    net, plain_net = Net(depth, copies), Net(depth, Clocked())
    offloader = Offloader(copies)
    offload_activations(net, TARGETS, offloader)
    x, y = started(), started()
    plain_net(y).sum().backward()
    for passes in (1, 2):
        x.grad = None
        net(x).sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert net.most <= net.one_layer
        assert offloader.left == offloader.returned == passes * (depth - 1) * net.one_layer
        assert offloader.cancelled == 0
    assert plain_net.most >= (depth - 1) * net.one_layer


def test_each_layer_returns_once_the_last_first():
    copies = Clocked()
    net = Net(5, copies)
    offload_activations(net, ("layers.*.first",), Offloader(copies))
    net(started()).sum().backward()
    # The input and what was made of it carry its label; the last layer's stay.
    assert copies.order == [6, 6, 4, 4, 2, 2, 0, 0]


@pytest.mark.parametrize("depth", [4, 16, 64])
def test_compute_that_exceeds_its_copies_hides_them(depth):
    # Of the first part (64 + 128) x 4 = 768 bytes travel in 0.9 s, of the second 256 in 0.3 s; each computes 1 s.
    copies = Clocked(bytes_per_second=768 / 0.9, timeline=[])
    net = Net(depth, copies)
    offload_activations(net, TARGETS, Offloader(copies))
    net(started()).sum().backward()
    travelled = sum(span.end - span.start for span in copies.timeline if span.lane != "compute")
    assert travelled == pytest.approx(2 * (depth - 1) * 1.2)
    assert copies.stalled <= 0.05 * travelled
    spans = {lane: [s for s in copies.timeline if s.lane == lane] for lane in ("compute", "out", "back")}
    for of_lane in spans.values():
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(of_lane))


def test_copies_that_exceed_compute_are_waited_for():
    copies = Clocked(bytes_per_second=768 / 9)
    net = Net(16, copies)
    offload_activations(net, TARGETS, Offloader(copies))
    net(started()).sum().backward()
    # The clock knows: 15 layers of 12 s each way, against 2 s of compute in a layer forward and 4 s backward.
    assert copies.stalled > 15 * (12 - 2) + 15 * (12 - 4) - 30
    assert net.most <= net.one_layer


def test_memory_that_is_freed_too_early_shows():
    copies = SimulatedCopies()
    source, target = torch.ones(4), copies.host_buffer(4, torch.float32)
    event = copies.out(source, target, None)
    source.zero_()
    copies.wait(event)
    assert target.sum() == 0


def pipelined(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]]
) -> tuple[list[int], list[int], Offloader]:
    """Stages of one rank in the order of a schedule; labels in the order of their return, and of their use."""
    copies = Clocked(bytes_per_second=1e3)
    offloader = Offloader(copies)
    stages = [Net(2, copies) for _ in range(1 + max(stage for stage, _ in forwards))]
    for number, stage in enumerate(stages):
        offload_activations(stage, ("layers.*.first",), offloader, stage=number, keep_last=False)
    inputs = {key: started(label=100.0 * key[0] + 1000 * key[1]) for key in forwards}
    outputs = {key: stages[key[0]](inputs[key]) for key in forwards}
    for key in backwards:
        outputs.pop(key).sum().backward()
    used = [100 * stage + 1000 * micro + label for stage, micro in backwards for label in (2, 2, 0, 0)]
    want = {}
    for stage, micro in backwards:
        x = started(label=100.0 * stage + 1000 * micro)
        Net(2, Clocked())(x).sum().backward()
        want[stage, micro] = x.grad
    assert all(torch.equal(inputs[key].grad, want[key]) for key in want)
    return copies.order, used, offloader


@pytest.mark.parametrize(
    "forwards, backwards",
    [
        # One stage, micro-batches first in first out.
        ([(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (0, 2)]),
        # Two stages of one rank, the last in first out; micro-batches of each in their order.
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 0), (1, 1), (0, 0), (0, 1)]),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]),
    ],
)
def test_pipeline_stages_return_last_in_first_out_and_micro_batches_first_in_first_out(forwards, backwards):
    order, used, offloader = pipelined(forwards, backwards)
    # What was sent last had not left when the schedule turned round.
    stayed = offloader.cancelled // (4 * (64 + 128))
    assert sorted(order) == sorted(used)[: len(order)] or stayed
    assert [label for label in used if label in order] == order
    assert offloader.left == offloader.returned + offloader.cancelled


def test_a_graph_that_is_dropped_gives_its_buffers_back():
    copies = Clocked()
    net, offloader = Net(4, copies), Offloader(copies)
    offload_activations(net, TARGETS, offloader)
    for _ in range(3):
        net(started())
    first = sum(map(len, offloader._pool.values()))
    net(started()).sum().backward()
    assert sum(map(len, offloader._pool.values())) == first


@pytest.mark.parametrize(
    "offload, other, said",
    [
        ({"targets": ["core_atn"]}, {}, ["core_atn", "core_attn", "expert_fc1"]),
        ({"targets": ["shared_expert"]}, {}, ["shared_expert", "matched nothing"]),
        ({"targets": ["core_attn"], "fraction": 1.5}, {}, ["activation_offload.fraction = 1.5"]),
        ({"targets": ["core_attn"], "min_bytes": -1}, {}, ["activation_offload.min_bytes = -1"]),
        ({}, {"plugins": {"use": ["offload"]}}, ["activation_offload.targets = []"]),
        ({"targets": ["attn"]}, {"plugins": {"use": ["offload", "recompute"]}}, ["comes after 'recompute'"]),
    ],
)
def test_what_cannot_be_offloaded_is_refused_before_anything_runs(tmp_path, offload, other, said):
    config = from_dict({"activation_offload": offload, "job": {"dump_folder": str(tmp_path)}, **other})
    with pytest.raises(ConfigError) as error:
        validate(config)
        chosen(config)
    for words in said:
        assert words in str(error.value)


DEEPSEEK = {"model": {"name": "deepseek_v3", "flavor": "debug"}}


@pytest.mark.parametrize(
    "again, target, whole",
    [
        ({"mode": "full"}, "core_attn", "layers.*"),
        ({"mode": "selective"}, "attn_norm", "layers.*"),
        ({"mode": "targets", "targets": ["moe"]}, "expert_fc1", "moe"),
        ({"mode": "targets", "targets": ["layernorm", "**.self_attn"]}, "attn_proj", "attn"),
        ({"mode": "targets", "targets": ["layers.*"]}, "moe_act", "layers.*"),
        ({}, "core_attn", "layers.*"),
    ],
)
def test_targets_within_what_runs_again_are_not_silently_left_where_they_are(tmp_path, again, target, whole):
    use = {"plugins": {"use": [] if again else ["recompute", "offload"]}}

    def check(targets: list[str]) -> None:
        offload = {"activation_offload": {"targets": targets}}
        config = from_dict(
            {"job": {"dump_folder": str(tmp_path)}, "activation_checkpoint": again, **DEEPSEEK, **use, **offload}
        )
        validate(config)
        chosen(config)

    with pytest.raises(ConfigError, match=f"'{target}' keeps nothing that could travel.*Take it out"):
        check([target])
    check([whole])
