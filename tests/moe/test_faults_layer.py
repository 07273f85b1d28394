"""Faults that other systems had, as cases of the whole layer."""

import gc

import pytest
import torch
from oracle_layer import oracle_losses
from torch.utils.checkpoint import checkpoint

from titan_moe.moe import MoE, MoEConfig, finish_step

D = 8
LOSSES = {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "global_aux_loss_coef": 0.1, "z_loss_coef": 0.05}
EVERYTHING = {"shared_hidden_dim": 6, "shared_gate": True, "latent_dim": 4, "expert_linear_bias": True, **LOSSES}


def build(dtype=torch.float64, seed=0, **overrides):
    torch.manual_seed(seed)
    layer = MoE(MoEConfig(**{"dim": D, "hidden_dim": 8, "num_experts": 4, "top_k": 2, **overrides})).to(dtype)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def step(layer, x, dy=None, wrap=lambda layer, x: layer(x)):
    """Output and gradients of one forward and backward, by name."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = wrap(layer, x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("kernels")
def test_fault_13_main_loss_zero_leaves_the_gradient_of_the_auxiliary_losses(recompute):
    layer = build(**LOSSES)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    wrap = (lambda layer, x: checkpoint(layer, x, use_reentrant=False)) if recompute else (lambda layer, x: layer(x))
    got = step(layer, x, torch.zeros_like(x), wrap)
    weight = layer.router.weight.detach().requires_grad_()
    leaf = x.clone().requires_grad_()
    aux = oracle_losses(leaf.view(-1, D) @ weight.T, layer.config, [True] * 10, 2)
    expected_weight, expected_x = torch.autograd.grad(aux, [weight, leaf])
    assert got["router.weight"].abs().max() > 1e-3
    torch.testing.assert_close(got["router.weight"], expected_weight, atol=1e-10, rtol=0)
    torch.testing.assert_close(got["x"], expected_x, atol=1e-10, rtol=0)
    assert (got["experts.w1"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["grouped", "sequential"])
@pytest.mark.parametrize(
    "overrides",
    [{}, EVERYTHING, {"capacity_factor": 1.0}, {"capacity_factor": 1.0, "pad_to_capacity": True}, {"pad_counts_to": 8}],
    ids=["plain", "everything", "capacity", "pad-to-capacity", "pad-counts"],
)
@pytest.mark.parametrize("shape", [(0, 5, D), (3, 0, D), (0, D)])
def test_fault_14_and_38_no_tokens_keep_every_weight_in_the_graph(shape, overrides, experts, dtype):
    layer = build(dtype, experts=experts, **overrides)
    got = step(layer, torch.empty(shape, dtype=dtype))
    assert got["y"].shape == got["x"].shape == torch.Size(shape)
    for name, p in layer.named_parameters():
        assert got[name] is not None and got[name].shape == p.shape and (got[name] == 0).all(), name


@pytest.mark.parametrize("experts", ["grouped", "sequential"])
@pytest.mark.usefixtures("kernels")
def test_fault_14_one_token_equals_the_same_token_among_others(experts):
    layer = build(experts=experts, shared_hidden_dim=6)
    x = torch.randn(1, 7, D, dtype=torch.float64)
    single = step(layer, x[:, 3:4])
    among = step(layer, x)
    torch.testing.assert_close(single["y"], among["y"][:, 3:4], atol=1e-13, rtol=0)
    torch.testing.assert_close(single["x"], among["x"][:, 3:4], atol=1e-13, rtol=0)


def recompute_reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def recompute(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("wrap", [recompute, recompute_reentrant])
def test_fault_15_recompute_changes_no_gradient_count_or_bias(wrap):
    results = []
    for how in (lambda layer, x: layer(x), wrap):
        layer = build(score_function="sigmoid", expert_bias=True, capacity_factor=0.8, **LOSSES)
        torch.manual_seed(5)
        grads = [step(layer, torch.randn(2, 6, D, dtype=torch.float64), wrap=how) for _ in range(2)]
        results.append((grads, finish_step(layer), layer.router.expert_bias.clone()))
    (plain, report, bias), (again, report_again, bias_again) = results
    for a, b in zip(plain, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert report["routed_L"].item() == 2 * 12 * 2
    assert all(torch.equal(report[k], report_again[k]) for k in report if k != "names")
    assert torch.equal(bias, bias_again) and bias.abs().sum() > 0


def test_fault_15_evaluation_leaves_counts_and_bias_alone():
    layer = build(expert_bias=True, score_function="sigmoid", **LOSSES)
    layer.eval()
    with torch.no_grad():
        layer(torch.randn(2, 6, D, dtype=torch.float64))
    layer(torch.randn(2, 6, D, dtype=torch.float64)).sum().backward()
    report = finish_step(layer)
    assert report["routed_L"].item() == 0 and report["aux_loss_L"].item() == 0
    assert (layer.router.expert_bias == 0).all()


@pytest.mark.parametrize("wrap", [recompute, recompute_reentrant])
def test_fault_18_live_tensors_stay_flat_over_20_steps_with_recompute(wrap):
    layer = build(torch.float32, capacity_factor=0.9, **LOSSES)
    live = []
    for n in range(20):
        x = torch.randn(2, 6, D, requires_grad=True)
        wrap(layer, x).sum().backward()
        layer.zero_grad()
        finish_step(layer)
        del x
        if n in (2, 19):
            gc.collect()
            live.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert live[1] <= live[0], live  # leftovers of other tests may still go


def test_fault_19_constant_logits_recompute_to_the_same_routing():
    layer = build(aux_loss_coef=0.1)
    torch.nn.init.zeros_(layer.router.weight)
    x = torch.randn(2, 6, D, dtype=torch.float64)
    plain, again = step(layer, x), step(layer, x, wrap=recompute)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("experts", ["grouped", "sequential"])
@pytest.mark.usefixtures("kernels")
def test_fault_25_down_projection_bias_is_weighted_and_summed(experts):
    layer = build(expert_linear_bias=True, experts=experts)
    for name in ("w1", "w2", "b1"):
        torch.nn.init.zeros_(getattr(layer.experts, name))
    x = torch.randn(1, 6, D, dtype=torch.float64)
    logits = x[0] @ layer.router.weight.T
    for t, y in enumerate(layer(x)[0]):
        best = logits[t].argsort(descending=True)[:2]
        weights = logits[t][best].exp() / logits[t][best].exp().sum()
        expected = weights[0] * layer.experts.b2[best[0]] + weights[1] * layer.experts.b2[best[1]]
        torch.testing.assert_close(y, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("experts", ["grouped", "sequential"])
@pytest.mark.usefixtures("kernels")
def test_fault_33_nan_in_dropped_tokens_reaches_no_other_token(experts):
    """Tokens marked as padding hold NaN; all others come out as if they were not there."""
    layer = build(torch.float32, experts=experts, expert_linear_bias=True)
    x = torch.randn(1, 8, D)
    valid = torch.tensor([[True] * 5 + [False] * 3])
    clean = step(layer, x[:, :5])
    x[:, 5:] = float("nan")
    dy = torch.ones_like(x)
    dy[:, 5:] = 0
    for _ in range(2):
        got = step(layer, x, dy, wrap=lambda layer, x: layer(x, valid))
        torch.testing.assert_close(got["y"][:, :5], clean["y"])
        torch.testing.assert_close(got["x"][:, :5], clean["x"])
        for name in ("experts.w1", "experts.w2", "experts.b1", "experts.b2"):
            torch.testing.assert_close(got[name], clean[name], msg=name)


@pytest.fixture
def poisoned_memory():
    """Freshly allocated tensors are full of NaN."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("overrides", [{"capacity_factor": 0.6}, {"pad_counts_to": 3}, EVERYTHING])
@pytest.mark.usefixtures("kernels")
def test_fault_33_empty_slots_under_poisoned_memory(poisoned_memory, overrides):
    """Slots without an expert read a row that is zero, in forward and backward, whatever the memory held."""
    exact, layer = build(**overrides), build(torch.float32, **overrides)
    layer.load_state_dict(exact.state_dict())
    x, dy = torch.randn(2, 2, 7, D, dtype=torch.float64).float()
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 4:] = False
    got, expected = (
        step(m, x.to(d), dy.to(d), wrap=lambda layer, x: layer(x, valid))
        for m, d in ((layer, torch.float32), (exact, torch.float64))
    )
    for name in expected:
        # fp32 sums of at most 14 tokens of magnitude up to about 10.
        torch.testing.assert_close(got[name].double(), expected[name].double(), atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.usefixtures("kernels")
def test_fault_33_dead_expert_has_zero_gradient():
    layer = build(torch.float32, expert_linear_bias=True, router_bias=True)
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([0.0, -1e4, 0.0, 0.0]))
    got = step(layer, torch.randn(2, 6, D))
    for name in ("w1", "w2", "b1", "b2"):
        assert (got[f"experts.{name}"][1] == 0).all() and got[f"experts.{name}"].abs().sum() > 0


@pytest.mark.parametrize("tokens", [1, 7, 8, 31, 33])
def test_fault_34_any_number_of_tokens_padded_to_the_alignment_and_back(tokens):
    plain, padded = build(torch.float64), build(torch.float64, pad_counts_to=16)
    x, dy = torch.randn(2, 1, tokens, D, dtype=torch.float64)
    a, b = step(plain, x, dy), step(padded, x, dy)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["expand", "transpose", "cat", "offset"])
@pytest.mark.usefixtures("kernels")
def test_fault_36_gradient_and_input_with_any_strides(kind):
    layer = build(shared_hidden_dim=6, latent_dim=4, **LOSSES)

    def awkward(t):
        if kind == "expand":
            return t[:, :1].expand_as(t)
        if kind == "transpose":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if kind == "cat":
            return torch.cat([t, t], dim=-1)[..., :D]
        return torch.cat([t.new_ones(1), t.flatten()])[1:].view_as(t)

    x, dy = torch.randn(2, 2, 5, D, dtype=torch.float64)
    for given_x, given_dy in ((x, awkward(dy)), (awkward(x), dy)):
        expected = step(layer, given_x.contiguous(), given_dy.contiguous())
        got = step(layer, given_x, given_dy)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], atol=1e-12, rtol=0, msg=name)
        layer.balance.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fault_37_two_runs_are_bitwise_equal(dtype):
    torch.manual_seed(3)
    x = torch.randn(4, 32, D, dtype=dtype)
    runs = [step(build(dtype, capacity_factor=1.1, **EVERYTHING), x) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_layer_on_meta_has_shapes_and_no_values():
    with torch.device("meta"):
        layer = MoE(MoEConfig(64, 32, 16, 4, **EVERYTHING))
    assert all(p.is_meta for p in layer.parameters())
    names = dict(layer.named_parameters())
    assert names["experts.w1"].shape == (16, 2, 32, 4) and names["shared.gate.weight"].shape == (1, 64)
    assert names["latent_up.weight"].shape == (64, 4) and names["router.weight"].shape == (16, 64)
