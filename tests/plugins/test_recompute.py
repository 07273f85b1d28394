"""Recompute: no bit changes, bytes are those of the formulas, discarded outputs have no memory, and refusals."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from titan_moe import models
from titan_moe.config import from_dict, validate
from titan_moe.errors import ConfigError, TrainingError
from titan_moe.models import Decoder, token_losses
from titan_moe.moe.balance import finish_step
from titan_moe.observe.memory import TensorTracker, total_bytes
from titan_moe.plugins import chosen
from titan_moe.plugins.recompute import costly_operators, recompute_layers, recompute_targets
from titan_moe.plugins.saved import Tape, saved_tensors
from titan_moe.plugins.savings import savings
from titan_moe.plugins.targets import RECOMPUTE, find

TINY = {"num_layers": 3, "vocab_size": 40, "dim": 32, "num_heads": 4, "hidden_dim": 24, "num_experts": 8, "top_k": 2}
OF_FAMILY = {
    "deepseek_v3": {
        **{"num_dense_layers": 1, "ffn_dim": 48, "shared_hidden_dim": 20, "mtp_depth": 1, "num_groups": 4},
        **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20},
    },
    "qwen3_moe": {"num_kv_heads": 2, "head_dim": 16},
    "minimax_m2": {"num_kv_heads": 2, "head_dim": 16, "rotary_dims": 8},
    "gpt_oss": {"num_kv_heads": 2, "head_dim": 16, "sliding_window": 24},
    "glm4_moe": {"num_kv_heads": 2, "head_dim": 16, "num_dense_layers": 1, "ffn_dim": 48, "shared_hidden_dim": 20},
}
ALL = tuple(RECOMPUTE)
FINE = ("layernorm", "qk_norm", "mla_up_proj", "core_attn", "moe_act")


def build(family: str, dtype: torch.dtype = torch.float32, **override) -> Decoder:
    torch.set_default_dtype(dtype)
    try:
        return models.build(family, "debug", seed=1, **{**TINY, **OF_FAMILY[family], **override}).train()
    finally:
        torch.set_default_dtype(torch.float32)


def batch(model: Decoder, rows: int = 2, length: int = 70) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(model.config.vocab_size, (rows, length), generator=generator) for _ in range(2))


def trained(model: Decoder, passes: int = 2) -> dict[str, Tensor]:
    """Loss, gradients, counters of some passes."""
    ids, labels = batch(model)
    torch.manual_seed(5)
    losses = []
    for _ in range(passes):
        total = token_losses(model(ids), labels, None, 0.3).total
        total.backward()
        losses.append(total.detach())
    made = {"losses": torch.stack(losses)} | {name: p.grad for name, p in model.named_parameters()}
    return made | dict(model.named_buffers()) | {"counts": finish_step(model)["counts_LE"]}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def named(model: Decoder, targets) -> list[str]:
    """Those of ``targets`` that the model has."""
    return [target for target in targets if find(model, [target], RECOMPUTE)]


@pytest.fixture(scope="module")
def plain():
    known = {}

    def result(family: str, **override) -> dict[str, Tensor]:
        key = family, *override.items()
        if key not in known:
            known[key] = trained(build(family, **override))
        return known[key]

    return result


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("family", OF_FAMILY)
def test_each_target_alone_changes_no_bit(plain, family, target):
    model = build(family, jitter=0.1)
    if not named(model, [target]):
        assert target not in savings(model.config, 1, 1, 4)
        return
    assert recompute_targets(model, [target])
    assert_equal(trained(model), plain(family, jitter=0.1))


@pytest.mark.parametrize("targets", [ALL, FINE, ("layernorm", "mlp", "shared_expert"), ("**.o_proj",), ("layers.*",)])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_targets_together_change_no_bit(plain, family, targets):
    model = build(family, jitter=0.1)
    assert recompute_targets(model, [t for t in targets if "*" in t or named(model, [t])])
    assert_equal(trained(model), plain(family, jitter=0.1))


@pytest.mark.parametrize("context_fn", [None, costly_operators()], ids=["full", "selective"])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_layers_and_operators_change_no_bit(plain, family, context_fn):
    model = build(family, jitter=0.1)
    assert recompute_layers(model, context_fn) == len(model.layers) + len(model.mtp)
    assert_equal(trained(model), plain(family, jitter=0.1))


def test_recompute_in_autocast_repeats_in_autocast(plain):
    results = []
    for targets in ((), FINE):
        model = build("qwen3_moe")
        recompute_targets(model, named(model, targets))
        ids, labels = batch(model)
        with torch.autocast("cpu", torch.bfloat16):
            total = token_losses(model(ids), labels, None, 0.3).total
        total.backward()
        results.append({"loss": total.detach()} | {name: p.grad for name, p in model.named_parameters()})
    assert_equal(results[1], results[0])


def test_evaluation_and_a_backward_twice():
    model = build("deepseek_v3")
    recompute_targets(model, FINE)
    ids, labels = batch(model)
    with torch.no_grad():
        assert not model(ids)[0].requires_grad
    total = token_losses(model(ids), labels, None, 0.3).total
    first = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(total, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def held_after_forward(model: Decoder) -> int:
    ids, _ = batch(model)
    with TensorTracker() as tracker:
        outputs = model(ids)
        gc.collect()
        held = total_bytes(tracker.alive())
    del outputs
    return held


HELD = [
    (family, dtype, "preact")
    for family in ("deepseek_v3", "qwen3_moe", "minimax_m2", "glm4_moe")
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
]
HELD += [("deepseek_v3", torch.float32, save) for save in ("input", "preact_fp8")]


@pytest.mark.parametrize(("family", "dtype", "save"), HELD)
def test_bytes_held_between_forward_and_backward_are_those_of_the_formula(family, dtype, save):
    # Wider than tall, so that the tables of experts count for less than a percent; values as wide as keys, since the
    # CPU's kernel pads them; few positions, since its attention otherwise works piece by piece.
    wide = {"dim": 64, "hidden_dim": 96, "mtp_depth": 0, "save": save}
    model = build(family, dtype, **wide)
    ids, _ = batch(model)
    plain = held_after_forward(model)
    expected = savings(model.config, ids.numel(), ids.shape[1], dtype.itemsize)
    assert expected.keys() == set(named(model, RECOMPUTE))
    for target, saving in expected.items():
        model = build(family, dtype, **wide)
        recompute_targets(model, [target])
        assert plain - held_after_forward(model) == pytest.approx(saving.nbytes, rel=0.01), target


def flops(model: Decoder, rows: int = 2) -> int:
    ids, labels = batch(model, rows)

    # Of the experts' forward pass alone: both sides of a comparison run the same backward pass.
    def up(x, w1, *_, out_shape) -> int:
        return 2 * out_shape[0][0] * out_shape[0][1] * x[1]

    def down(a, w2, *_, out_shape) -> int:
        return 2 * a[0] * a[1] * w2[1]

    def both(x, w1, b1, w2, b2, weights, slot_of, *_, out_shape) -> int:
        return 2 * slot_of[0] * w2[1] * w2[2] * (w1[1] + 1)

    operators = torch.ops.titan_moe
    products = {operators.gather_up: up, operators.down: down, operators.mlp_cpu: both}
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        token_losses(model(ids), labels, None, 0.3).total.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("target", ["layernorm", "qk_norm", "mla_up_proj", "moe_act", "mlp", "shared_expert", "moe"])
def test_products_that_run_again_are_those_of_the_formula(target):
    model = build("deepseek_v3", mtp_depth=0)
    plain, ids = flops(model), batch(model)[0]
    recompute_targets(model, [target])
    expected = savings(model.config, ids.numel(), ids.shape[1], 4)[target].flops
    # The experts' products count the spare row.
    assert flops(model) - plain == pytest.approx(expected, rel=0.01)


V3_SHAPED = {
    # The proportions of DeepSeek-V3: 1/28 of its dims, all of its experts per token.
    **{"dim": 256, "num_layers": 4, "num_dense_layers": 1, "ffn_dim": 656, "num_heads": 4, "vocab_size": 264},
    **{"q_lora_rank": 56, "kv_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48},
    **{"hidden_dim": 72, "num_experts": 32, "top_k": 8, "shared_hidden_dim": 72, "mtp_depth": 0},
}


def test_fine_recompute_of_a_v3_shaped_model_saves_its_share_for_few_flops():
    targets = ["layernorm", "moe_act", "mla_up_proj"]
    model = build("deepseek_v3", torch.bfloat16, **V3_SHAPED)
    ids, _ = batch(model)
    plain_bytes, plain_flops = held_after_forward(model), flops(model, 1)
    recompute_targets(model, targets)
    parts = savings(model.config, ids.numel(), ids.shape[1], 2)
    share = (plain_bytes - held_after_forward(model)) / plain_bytes
    assert share == pytest.approx(sum(parts[t].nbytes for t in targets) / plain_bytes, abs=0.03)
    assert share > 0.25
    assert flops(model, 1) < 1.05 * plain_flops


class Pair(nn.Module):
    """A producer and its two consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.seen: list[weakref.ref] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.seen.append(weakref.ref(y.untyped_storage()))
        return self.a(y).sin() + self.b(y.flip(0).flip(0)).cos() + self.a(y.view(2, -1, 16)).flatten(0, 1)


def size_of(storage: weakref.ref) -> int:
    return 0 if storage() is None else storage().nbytes()


def test_a_discarded_output_has_no_memory_between_its_last_use_and_its_restoration():
    pair, x = Pair(), torch.randn(6, 8)
    want = torch.autograd.grad(pair(x).sum(), list(pair.parameters()))
    recompute_targets(pair, ["*up"])
    pair.seen.clear()
    out = pair(x)
    (storage,) = pair.seen
    assert size_of(storage) == 0
    out.sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(pair.parameters(), want, strict=True))


def test_what_is_restored_is_shared_by_all_users_and_goes_with_the_last():
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref] = []

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            self.made.append(weakref.ref(y.untyped_storage()))
            return y

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.two = Watched(), nn.Linear(8, 8), nn.Linear(8, 8)
            self.sizes: list[list[int]] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            one, two = self.one(y), self.two(y)
            for out in (one, two):
                out.register_hook(lambda _: self.sizes.append([size_of(s) for s in self.first.made]))
            return one + two

    chain = Chain()
    recompute_targets(chain, ["*first"])
    out = chain(torch.randn(4, 8, requires_grad=True))
    assert [size_of(s) for s in chain.first.made] == [0]
    out.sum().backward()
    # One repetition serves both; before it there is nothing, and after the backward pass there is nothing again.
    assert len(chain.first.made) == 2
    assert chain.sizes[0] == [0] and [size_of(s) for s in chain.first.made] == [0, 0]


def test_an_output_changed_in_place_is_kept():
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.nn.functional.relu_(self.up(x)))

    torch.manual_seed(0)
    net, x = Changed(), torch.randn(5, 8)
    want = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    recompute_targets(net, ["*up"])
    got = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_dropout_draws_the_same_numbers_again():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.after = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.part(x))

    results = []
    for targets in ((), ("part*",)):
        torch.manual_seed(1)
        net = Dropping()
        recompute_targets(net, targets)
        net(torch.ones(4, 8)).sum().backward()
        results.append([p.grad for p in net.parameters()] + [torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_part_that_saves_something_else_the_second_time_is_named():
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.after, self.calls = nn.Module(), nn.Linear(8, 8), 0
            self.part.forward = self.run
            self.linear = nn.Linear(8, 8)

        def run(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x).exp() if self.calls == 1 else self.linear(x[:2]).exp()

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.part(x))

    net = Fickle()
    recompute_targets(net, ["*part"])
    out = net(torch.randn(4, 8))
    with pytest.raises(TrainingError, match=r"recompute of part: .*activation_checkpoint\.targets"):
        out.sum().backward()


def test_inside_of_another_checkpoint_it_still_works(plain):
    model = build("qwen3_moe")
    recompute_targets(model, FINE[:1])
    want = plain("qwen3_moe")
    ids, labels = batch(model)
    torch.manual_seed(5)
    for _ in range(2):
        token_losses(checkpoint(model, ids, use_reentrant=False), labels, None, 0.3).total.backward()
    assert [n for n, p in model.named_parameters() if not torch.equal(p.grad, want[n])] == []


def compiled(backend: str) -> Decoder:
    """A model with compiled layers, as the trainer makes it."""
    torch.compiler.reset()
    counters.clear()
    model = build("deepseek_v3", mtp_depth=0)
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward, backend=backend)
    return model


def saved_bytes(model: Decoder, monkeypatch) -> int:
    """Of the storages that the forward pass keeps; what makes up for others is not a tensor."""
    storages = {}

    def pack(tape: Tape, tensor: Tensor) -> object:
        kept = PACK(tape, tensor)
        if isinstance(kept, Tensor):
            storages[kept.untyped_storage()._cdata] = kept.untyped_storage()
        return kept

    saved_tensors(model)
    with monkeypatch.context() as patch:
        patch.setattr(Tape, "pack", pack)
        outputs = model(batch(model)[0])
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    held = sum(storage.nbytes() for key, storage in storages.items() if key not in weights)
    del outputs
    return held


PACK = Tape.pack


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_compiled_layers_recompute_the_same_parts(monkeypatch, backend):
    model = compiled(backend)
    held, want = saved_bytes(model, monkeypatch), trained(model, passes=1)
    graphs = counters["stats"]["unique_graphs"]
    x = 2 * 70 * 32 * 4
    # At least, in units of a layer's input: the compiler drops cheap things by itself, and decides within a part.
    for targets, least in {
        ("layernorm", "moe_act"): 4,
        ("mla_up_proj",): 20,
        ("core_attn",): 5,
        ("moe",): 5,
        ("layers.*",): 50,
        "full": 50,
    }.items():
        model = compiled(backend)
        if targets == "full":
            recompute_layers(model)
        else:
            recompute_targets(model, targets)
        assert held - saved_bytes(model, monkeypatch) > least * x, targets
        assert_close(trained(model, passes=1), want)
        # All of it is still compiled.
        assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"], targets


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        # fp32 sums in another order where the compiler fuses other operators.
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)


def job(mode: str, targets=(), **sections) -> object:
    return from_dict({"activation_checkpoint": {"mode": mode, "targets": list(targets)}, **sections})


@pytest.mark.parametrize(
    "mode, targets, said",
    [
        ("targets", ["layernrom"], ["layernrom", "layernorm", "core_attn", "shared_expert"]),
        ("targets", ["nonsense"], ["nonsense", "mla_up_proj", "**.o_proj"]),
        ("targets", ["mla_up_proj"], ["mla_up_proj", "matched nothing"]),
        ("targets", ["layernorm", "layers.*.attention"], ["layers.*.attention", "matched nothing"]),
        ("targets", [], ["targets", "at least one"]),
        ("full", ["layernorm"], ["layernorm", "mode = 'targets'"]),
        ("none", ["layernorm"], ["layernorm", "mode = 'targets'"]),
    ],
)
def test_what_cannot_be_recomputed_is_refused_before_anything_runs(tmp_path, mode, targets, said):
    config = job(mode, targets, job={"dump_folder": str(tmp_path)})
    with pytest.raises(ConfigError) as error:
        validate(config)
        chosen(config)
    for words in said:
        assert words in str(error.value)


def test_what_lies_within_another_target_is_part_of_it():
    model = build("deepseek_v3")
    names = [
        (match.name, match.method)
        for match in recompute_targets(model, ["moe", "shared_expert", "**.self_attn", "core_attn"])
    ]
    assert names.count(("layers.1.mlp", "forward")) == 1 and ("layers.1.mlp.shared", "forward") not in names
    assert ("layers.1.self_attn", "attend") not in names


def test_whole_layers_keep_their_outputs():
    model = build("qwen3_moe")
    recompute_targets(model, ["layers.*"])
    x, kept = 2 * 70 * 32 * 4, held_after_forward(model)
    # The input of each layer and what the last norm and the head need, and tables: no layer hangs on the one before.
    assert kept < 12 * x
