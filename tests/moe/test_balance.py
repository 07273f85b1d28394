"""Auxiliary losses against loops and autograd, counters under eval and recompute, and the step-end update."""

import gc

import oracle_routing as oracle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe.moe import MoE
from titan_moe.moe.balance import Balance, finish_step, set_token_weight
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router

torch.set_num_threads(1)
B, S, D, E = 4, 5, 6, 8
COEFS = ("aux_loss_coef", "seq_aux_loss_coef", "global_aux_loss_coef", "z_loss_coef")
CLOSE = {"rtol": 1e-10, "atol": 1e-13}  # Float64: summation order alone differs.
V3 = {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "topk_groups": 2}


class Layer(nn.Module):
    """Router, balance and a stand-in for experts: token t's output is x_t times its summed weights."""

    def __init__(self, seed: int = 0, **fields) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = MoEConfig(**{"dim": D, "hidden_dim": 4, "num_experts": E, "top_k": 2, **fields})
        self.router = Router(config).double()
        self.balance = Balance(config)
        if config.expert_bias:
            nn.init.normal_(self.router.expert_bias, std=0.5)

    def forward(self, x_BSD: torch.Tensor, valid_BS: torch.Tensor | None = None) -> torch.Tensor:
        x_TD = x_BSD.reshape(-1, D)
        valid_T = None if valid_BS is None else valid_BS.reshape(-1)
        routing, aux = self.router(x_TD, self.balance, valid_T, x_BSD.shape[0])
        y_TD = x_TD * routing.weights_TK.sum(1, keepdim=True)
        return (y_TD if aux is None else self.balance.inject(y_TD, aux)).view_as(x_BSD)


def batch(seed: int = 1, sequences: int = B) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(sequences, S, D, dtype=torch.float64, requires_grad=True)


def gradient(layer: Layer, *micro_batches, valid=None, weight=None) -> torch.Tensor:
    """Router gradient of the auxiliary losses alone."""
    layer.router.weight.grad = None
    set_token_weight(layer, weight)
    for x in micro_batches:
        (layer(x, valid) * 0).sum().backward()
    return layer.router.weight.grad


def expected(layer: Layer, x_BSD: torch.Tensor, valid_BS=None) -> torch.Tensor:
    """The enabled losses of one micro-batch at the start of a step, mean over its valid tokens, by loops."""
    config = layer.router.config
    logits_BSE = x_BSD @ layer.router.weight.T
    valid_BS = torch.ones(x_BSD.shape[:2], dtype=torch.bool) if valid_BS is None else valid_BS
    logits, valid = logits_BSE.flatten(0, 1), valid_BS.flatten()
    flat, _ = oracle.balance_loss(logits, config, valid)
    loss = (config.aux_loss_coef + config.global_aux_loss_coef) * flat
    for b in range(x_BSD.shape[0]):
        one, _ = oracle.balance_loss(logits_BSE[b], config, valid_BS[b])
        loss = loss + config.seq_aux_loss_coef * one * (valid_BS[b].sum().double() / valid_BS.sum())
    return loss + config.z_loss_coef * oracle.z_loss(logits, valid) if config.z_loss_coef else loss


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("enabled", [*COEFS, "all"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize_weights": False},
        {"score_function": "sigmoid"},
        {"score_function": "sqrtsoftplus"},
        V3,
        {"selection": "round_robin"},
    ],
    ids=["softmax", "pre_softmax", "sigmoid", "sqrtsoftplus", "v3", "round_robin"],
)
def test_fault_13_main_loss_zero_leaves_the_gradient_of_the_auxiliary_losses(fields, enabled, padding):
    coefs = {name: 0.1 + i for i, name in enumerate(COEFS) if enabled in (name, "all")}
    layer, x = Layer(**fields, **coefs), batch()
    valid = torch.rand(B, S) < 0.6 if padding else None
    got = gradient(layer, x, valid=valid)
    loss = expected(layer, x, valid)
    want, want_x = torch.autograd.grad(loss, [layer.router.weight, x])
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(x.grad, want_x, **CLOSE)
    report = finish_step(layer)
    torch.testing.assert_close(report["aux_loss_L"] + report["z_loss_L"], loss.detach()[None], **CLOSE)
    assert (report["z_loss_L"] != 0).item() == ("z_loss_coef" in coefs)
    assert (report["aux_loss_L"] != 0).item() == (enabled != "z_loss_coef")


@pytest.mark.usefixtures("kernels")
def test_fault_9_sigmoid_router_uses_sigmoid_scores():
    sigmoid, softmax = Layer(score_function="sigmoid", aux_loss_coef=1.0), Layer(aux_loss_coef=1.0)
    x = batch()
    got = gradient(sigmoid, x)
    logits = (x @ sigmoid.router.weight.T).flatten(0, 1)
    s = logits.sigmoid()
    f = torch.zeros(E, dtype=torch.float64).index_add(0, s.topk(2).indices.flatten(), torch.ones(2 * B * S).double())
    loss = E * (f / (2 * B * S) * (s / s.sum(1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(got, torch.autograd.grad(loss, sigmoid.router.weight)[0], **CLOSE)
    assert not torch.allclose(got, gradient(softmax, x), rtol=0.1)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("name", COEFS[:3])
@pytest.mark.usefixtures("kernels")
def test_uniform_router_gives_exactly_the_coefficient(name, function):
    layer = Layer(score_function=function, **{name: 0.25})
    nn.init.zeros_(layer.router.weight)
    layer(batch())
    # 20 tokens x 1/8 is exact in binary; 1/20 is not, so one rounding remains, and normalising adds one more.
    assert abs(finish_step(layer)["aux_loss_L"].item() - 0.25) < 2e-16


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.usefixtures("kernels")
def test_fault_7_seq_aux_gradient_does_not_depend_on_the_micro_batch_size(size, padding):
    layer, x = Layer(seq_aux_loss_coef=0.3, z_loss_coef=0.1), batch()
    valid = torch.rand(B, S) < 0.6 if padding else torch.ones(B, S, dtype=torch.bool)
    want = torch.autograd.grad(expected(layer, x, valid), layer.router.weight)[0]
    set_token_weight(layer, 1 / valid.sum().double())
    for i in range(0, B, size):
        (layer(x[i : i + size], valid[i : i + size]) * 0).sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, want, **CLOSE)


def test_token_weight_carries_global_tokens_and_loss_scale():
    layer, x = Layer(**dict.fromkeys(COEFS, 0.1)), batch()
    mean = gradient(layer, x)
    finish_step(layer)
    weighted = gradient(layer, x, weight=torch.tensor(1024 / 80, dtype=torch.float64))
    torch.testing.assert_close(weighted, mean * (1024 * B * S / 80), **CLOSE)


@pytest.mark.parametrize("ranks", [1, 4])
def test_fault_8_identical_data_on_more_ranks_keeps_the_global_aux_gradient(ranks):
    x = batch()
    total = torch.zeros_like(Layer().router.weight)
    for _ in range(ranks):
        layer = Layer(global_aux_loss_coef=0.3)
        layer.balance.reduce_counts = lambda counts: counts * ranks
        total += gradient(layer, x, weight=torch.tensor(1 / (ranks * B * S), dtype=torch.float64))
    layer = Layer(global_aux_loss_coef=0.3)
    torch.testing.assert_close(total, torch.autograd.grad(expected(layer, x), layer.router.weight)[0], **CLOSE)


@pytest.mark.usefixtures("kernels")
def test_fault_8_data_split_over_two_ranks_gives_the_global_aux_gradient_of_one():
    x, weight = batch(), torch.tensor(1 / (B * S), dtype=torch.float64)
    whole = Layer(global_aux_loss_coef=0.3)
    want = torch.autograd.grad(expected(whole, x), whole.router.weight)[0]
    halves = [x[:2], x[2:]]
    counts = []
    for half in halves:
        layer = Layer(global_aux_loss_coef=0.3)
        layer(half)
        counts.append(layer.balance.global_counts_E.clone())
    total = torch.zeros_like(want)
    for half in halves:
        layer = Layer(global_aux_loss_coef=0.3)
        layer.balance.reduce_counts = lambda own: sum(counts)
        total += gradient(layer, half, weight=weight)
    torch.testing.assert_close(total, want, **CLOSE)


@pytest.mark.usefixtures("kernels")
def test_global_aux_uses_the_counts_of_the_step_so_far_and_starts_anew_after_it():
    layer = Layer(global_aux_loss_coef=1.0)
    # As three ranks with the same data: an all-reduce works in place and must leave the running counts alone.
    layer.balance.reduce_counts = lambda counts: counts.mul_(3)
    for _ in range(2):
        totals, want = [0] * E, 0.0
        layer.router.weight.grad = None
        for seed in (1, 2, 3):
            x = batch(seed)
            (layer(x) * 0).sum().backward()
            logits = (x @ layer.router.weight.T).flatten(0, 1)
            _, counts = oracle.balance_loss(logits, layer.router.config)
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
            want = want + oracle.balance_loss(logits, layer.router.config, totals=totals)[0]
        torch.testing.assert_close(layer.router.weight.grad, torch.autograd.grad(want, layer.router.weight)[0], **CLOSE)
        finish_step(layer)


@pytest.mark.parametrize("fields", [{}, V3])
@pytest.mark.usefixtures("kernels")
def test_fault_11_half_the_tokens_padded_equals_the_unpadded_run(fields):
    def run(x, valid):
        layer = Layer(**fields, **dict.fromkeys(COEFS, 0.1), capacity_factor=0.75)
        grad = gradient(layer, x, valid=valid)
        return grad, finish_step(layer), layer.router.expert_bias

    x = batch()
    valid = torch.arange(2 * S) < S
    padded = torch.cat([x, torch.full_like(x, 3.0)], dim=1).detach()
    (grad, report, bias), (want_grad, want_report, want_bias) = run(padded, valid.expand(B, -1)), run(x, None)
    torch.testing.assert_close(grad, want_grad, **CLOSE)
    for key in ("counts_LE", "routed_L", "dropped_L"):
        assert torch.equal(report[key], want_report[key]), key
    assert report["dropped_L"].item() > 0
    for key in ("aux_loss_L", "z_loss_L"):
        torch.testing.assert_close(report[key], want_report[key], **CLOSE)
    assert bias is None or torch.equal(bias, want_bias)


def test_fault_15_evaluation_counts_nothing_and_has_no_loss():
    layer, x = Layer(**V3, **dict.fromkeys(COEFS, 0.1)), batch()
    layer.eval()
    before = layer.router.expert_bias.clone()
    _, aux = layer.router(x.flatten(0, 1), layer.balance, None, x.shape[0])
    assert aux is None
    report = finish_step(layer)
    assert report["routed_L"].tolist() == [0] and report["aux_loss_L"].tolist() == [0]
    assert torch.equal(layer.router.expert_bias, before)


def recompute(mode: str, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if mode == "none" else checkpoint(layer, x, use_reentrant=mode == "reentrant")


@pytest.mark.parametrize("order", ["one by one", "all forwards first", "last backward first", "one backward"])
@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.usefixtures("kernels")
def test_fault_15_recompute_counts_once_and_changes_no_loss(mode, order, jitter):
    def run(mode):
        layer = Layer(**V3, **dict.fromkeys(COEFS, 0.1), capacity_factor=0.75, jitter=jitter)
        reduced = []
        layer.balance.reduce_counts = lambda counts: reduced.append(1) or counts * 2
        torch.manual_seed(5)
        xs = [batch(seed) for seed in (1, 2, 3)]
        torch.manual_seed(6)
        if order == "one by one":
            for x in xs:
                recompute(mode, layer, x).square().sum().backward()
        else:
            losses = [recompute(mode, layer, x).square().sum() for x in xs]
            if order == "one backward":
                sum(losses).backward()
            else:
                for loss in losses if order == "all forwards first" else losses[::-1]:
                    loss.backward()
        report = finish_step(layer)
        return layer.router.weight.grad, [x.grad for x in xs], report, layer.router.expert_bias, len(reduced)

    grad, x_grads, report, bias, reduced = run(mode)
    want_grad, want_x_grads, want_report, want_bias, want_reduced = run("none")
    torch.testing.assert_close(grad, want_grad, **CLOSE)
    for got, want in zip(x_grads, want_x_grads, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    assert report["routed_L"].item() == 3 * B * S * 2 and reduced == want_reduced == 3
    for key in report:
        if key != "names":
            assert torch.equal(report[key], want_report[key]), key
    assert torch.equal(bias, want_bias)


def test_fault_18_a_step_leaves_no_graph_and_no_tensor_behind():
    layer = Layer(**V3, **dict.fromkeys(COEFS, 0.1))

    def step():
        checkpoint(layer, batch(), use_reentrant=False).sum().backward()
        finish_step(layer)
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    step()
    assert step() >= step() >= step()  # leftovers of other tests may still go
    layer(batch())
    held = [*layer.balance.buffers(), *(t for pair in layer.balance._seen for t in pair)]
    assert len(held) > 5 and all(t.grad_fn is None for t in held)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_inject_passes_y_through_and_gives_aux_a_gradient_of_one(dtype):
    y = torch.randn(3, dtype=torch.float32, requires_grad=True)
    aux = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    out = Balance.inject(y, aux)
    assert torch.equal(out, y)
    (out * 7).sum().backward()
    assert torch.equal(y.grad, torch.full((3,), 7.0)) and aux.grad == 1 and aux.grad.dtype == dtype


def test_inject_works_with_a_backward_split_into_inputs_and_weights():
    layer, x = Layer(**dict.fromkeys(COEFS, 0.1)), batch()
    torch.autograd.backward(layer(x).square().sum(), inputs=[x, layer.router.weight])
    want_x, want_w = x.grad, layer.router.weight.grad
    finish_step(layer)
    loss = layer(x).square().sum()
    (got_x,) = torch.autograd.grad(loss, [x], retain_graph=True)
    (got_w,) = torch.autograd.grad(loss, [layer.router.weight])
    assert torch.equal(got_x, want_x) and torch.equal(got_w, want_w)


def test_a_low_precision_output_takes_an_fp32_loss():
    layer = Layer(aux_loss_coef=1.0).float()
    x = batch().detach().to(torch.bfloat16)
    y = layer.balance.inject(x.flatten(0, 1), layer.router(x.flatten(0, 1), layer.balance, None, x.shape[0])[1])
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and layer.router.weight.grad.abs().max() > 0


def test_finish_step_moves_the_bias_by_the_sign_rule_in_place_and_resets():
    model = nn.ModuleDict(
        {"a": Layer(**V3, bias_update_speed=0.01), "b": nn.ModuleDict({"mlp": Layer(1, num_experts=4)})}
    )
    a, b = model["a"], model["b"]["mlp"]
    before, storage = a.router.expert_bias.clone(), a.router.expert_bias.data_ptr()
    a.balance.counts_E.copy_(torch.tensor([5, 5, 5, 5, 5, 5, 6, 4]))
    b.balance.counts_E.copy_(torch.tensor([1, 2, 3, 4]))
    b.balance.dropped.fill_(3)
    report = finish_step(model)
    assert report["names"] == ["a", "b.mlp"]
    assert report["counts_LE"].tolist() == [[5, 5, 5, 5, 5, 5, 6, 4], [1, 2, 3, 4, 0, 0, 0, 0]]
    assert report["counts_LE"].dtype == torch.int64
    assert report["num_experts_L"].tolist() == [8, 4]
    assert report["routed_L"].tolist() == [40, 10] and report["dropped_L"].tolist() == [0, 3]
    moved = before + 0.01 * torch.tensor([0, 0, 0, 0, 0, 0, -1.0, 1.0], dtype=torch.float64)
    assert torch.equal(a.router.expert_bias, moved) and a.router.expert_bias.data_ptr() == storage
    assert report["bias_min_L"].tolist() == [moved.min().item(), 0]
    assert report["bias_max_L"].tolist() == [moved.max().item(), 0]
    a.balance.counts_E[0] = 7
    assert finish_step(model, update_bias=False)["routed_L"].tolist() == [7, 0]
    assert torch.equal(a.router.expert_bias, moved)
    again = finish_step(model)
    assert again["routed_L"].tolist() == [0, 0] and again["dropped_L"].tolist() == [0, 0]
    assert torch.equal(a.router.expert_bias, moved)


def test_sign_rule_is_exact_for_counts_beyond_float32():
    layer = Layer(score_function="sigmoid", expert_bias=True, bias_update_speed=1.0)
    layer.router.expert_bias.zero_()
    layer.balance.counts_E.fill_(2**40)
    layer.balance.counts_E[3] += 8
    finish_step(layer)  # The mean is 2^40 + 1.
    assert layer.router.expert_bias.tolist() == [1, 1, 1, -1, 1, 1, 1, 1]


def test_fault_16_bias_follows_the_counts_of_all_ranks():
    layers = [Layer(**V3, seed=0) for _ in range(2)]
    for i, layer in enumerate(layers):
        layer(batch(i))
    packed = []
    finish_step(Layer(**V3), reduce=lambda t: packed.append(t.shape) or t)
    counts = sum(layer.balance.counts_E for layer in layers)
    others = [layer.balance.counts_E.clone() for layer in layers]
    want = layers[0].router.expert_bias + 1e-3 * (counts.double().mean() - counts).sign()
    calls = []
    for i, layer in enumerate(layers):

        def reduce(t, i=i):
            calls.append(t)
            return t + torch.cat([others[1 - i].double(), t.new_zeros(3)])

        finish_step(layer, reduce)
        assert torch.equal(layer.router.expert_bias, want)
    assert len(calls) == 2 and len(packed) == 1


def test_finish_step_without_moe_layers_still_reduces_once():
    calls = []
    report = finish_step(nn.Linear(2, 2), lambda t: calls.append(t.shape) or t)
    assert calls == [(0,)] and report["names"] == []
    assert all(len(value) == 0 for value in report.values())


def test_counters_and_bias_of_a_cast_model_keep_their_dtype_and_counters_are_not_saved():
    layer = Layer(**V3, aux_loss_coef=0.1).float().to(torch.bfloat16)
    assert layer.balance.aux_loss.dtype == torch.float64 and layer.balance.counts_E.dtype == torch.int64
    assert sorted(layer.state_dict()) == ["router.expert_bias", "router.weight"]


def test_fault_9_losses_come_before_capacity_and_padding():
    fields = {"seq_aux_loss_coef": 1.0}
    x = batch()
    plain = gradient(Layer(**fields), x)
    layer = Layer(**fields, capacity_factor=1.0, pad_to_capacity=True)
    assert torch.equal(gradient(layer, x), plain)
    assert abs(finish_step(layer)["aux_loss_L"].item() - 1) > 1e-3


def test_a_loss_enters_where_compiled_code_returns_what_it_was_given():
    # As in a layer whose graph breaks between its experts and its end, which FSDP of the experts does.
    @torch.compile(backend="aot_eager")
    def end(y, aux):
        return Balance.inject(y, aux).view(2, 3)

    y, aux = torch.ones(6, requires_grad=True), torch.ones((), requires_grad=True)
    end(y * 2, aux).sum().backward()
    assert aux.grad.item() == 1 and torch.equal(y.grad, torch.full((6,), 2.0))


@pytest.mark.parametrize("wrap", ["compile", "checkpoint of compiled", "compiled checkpoint"])
@pytest.mark.usefixtures("kernels")
def test_fault_15_compiled_layer_counts_once_and_changes_no_loss(wrap):
    def run(wrap):
        layer, x = Layer(**V3, **dict.fromkeys(COEFS, 0.1), capacity_factor=0.75), batch()
        # aot_eager traces forward and backward as inductor would, without compiling kernels.
        if wrap == "compile":
            call = torch.compile(layer, backend="aot_eager")
        elif wrap == "checkpoint of compiled":
            compiled = torch.compile(layer, backend="aot_eager")

            def call(x):
                return checkpoint(compiled, x, use_reentrant=False)
        elif wrap == "compiled checkpoint":
            call = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager")
        else:
            call = layer
        call(x).square().sum().backward()
        return layer.router.weight.grad, finish_step(layer)

    (grad, report), (want_grad, want_report) = run(wrap), run("none")
    torch.testing.assert_close(grad, want_grad, **CLOSE)
    for key in ("counts_LE", "dropped_L"):
        assert torch.equal(report[key], want_report[key])
    for key in ("aux_loss_L", "z_loss_L"):
        torch.testing.assert_close(report[key], want_report[key], **CLOSE)
    assert report["aux_loss_L"].item() > 0


def add_ranks(counts):
    dist.all_reduce(counts)
    return counts


def compiled_over_ranks():
    """Eager and compiled gradients and counters of two micro-batches, whose losses are summed over ranks."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = MoE(MoEConfig(dim=6, hidden_dim=5, num_experts=8, top_k=2, **dict.fromkeys(COEFS, 0.3))).double()
        layer.balance.share_counts = layer.balance.reduce_counts = add_ranks
        if compiled:
            torch._dynamo.reset()
            layer.compile(fullgraph=True, backend="aot_eager")
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(2):
            layer(torch.randn(2, 9, 6, dtype=torch.float64)).sum().backward()
        found.append({n: p.grad for n, p in layer.named_parameters()} | dict(layer.balance.named_buffers()))
    return found


@pytest.mark.slow
def test_losses_over_ranks_and_over_the_step_compile_to_one_graph(run_ranks):
    for eager, compiled in run_ranks(2, compiled_over_ranks):
        for name, want in eager.items():
            torch.testing.assert_close(compiled[name], want, atol=1e-12, rtol=0)
        assert eager["global_counts_E"].sum() == 2 * 18 * 2
