"""Scoring, selection and weights against a loop over tokens; what must survive casts, recompute and bad numbers."""

import contextlib
import math

import oracle_routing as oracle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from titan_moe.errors import ConfigError
from titan_moe.kernels.router_topk import stable_topk
from titan_moe.moe.balance import Balance
from titan_moe.moe.capacity import apply_capacity, pad_counts
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router, score, sinkhorn

torch.set_num_threads(1)
T, D, E = 13, 6, 8

VARIANTS = {
    "softmax_post": {"normalize_weights": True},
    "softmax_pre": {"normalize_weights": False},
    "softmax_pre_k1": {"normalize_weights": False, "top_k": 1},
    "softmax_all_experts": {"top_k": 8},
    "softmax_bias": {"expert_bias": True},
    "softmax_groups_v2": {
        "num_groups": 4,
        "topk_groups": 2,
        "group_score_k": 1,
        "group_mask": "zero",
        "normalize_weights": False,
        "route_scale": 1.5,
    },
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid_raw": {"score_function": "sigmoid", "normalize_weights": False},
    "sigmoid_k1_llama4": {"score_function": "sigmoid", "top_k": 1, "weight_on": "input"},
    "sigmoid_bias": {"score_function": "sigmoid", "expert_bias": True, "route_scale": 2.5},
    "sigmoid_groups_v3": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "topk_groups": 2,
        "top_k": 3,
        "route_scale": 2.5,
    },
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    "sqrtsoftplus_bias": {"score_function": "sqrtsoftplus", "expert_bias": True, "normalize_weights": False},
    "gpt_oss": {"router_bias": True},
    "round_robin": {"selection": "round_robin", "top_k": 3},
    "round_robin_v3": {
        "selection": "round_robin",
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "topk_groups": 2,
    },
    "sinkhorn": {"selection": "sinkhorn"},
    "sinkhorn_sigmoid_k1": {"selection": "sinkhorn", "score_function": "sigmoid", "top_k": 1},
    "expert_choice": {"selection": "expert_choice"},
    "expert_choice_sigmoid": {"selection": "expert_choice", "score_function": "sigmoid", "route_scale": 2.0},
}


def make(seed=0, **fields) -> tuple[Router, Balance, torch.Tensor]:
    torch.manual_seed(seed)
    config = MoEConfig(**{"dim": D, "hidden_dim": 4, "num_experts": E, "top_k": 2, **fields})
    router = Router(config).double()
    if config.router_bias:
        torch.nn.init.normal_(router.bias)
    if config.expert_bias:
        torch.nn.init.normal_(router.expert_bias, std=0.5)
    return router, Balance(config), torch.randn(T, D, dtype=torch.float64, requires_grad=True)


def dense_weights(routing) -> torch.Tensor:
    used = routing.expert_ids_TK >= 0
    ids = routing.expert_ids_TK.clamp_min(0)
    return torch.zeros(ids.shape[0], E, dtype=torch.float64).scatter_add(1, ids, routing.weights_TK * used)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_loop_over_tokens_with_gradients(name, padding):
    router, balance, x = make(**VARIANTS[name])
    valid = torch.arange(T) % 3 != 1 if padding else None
    routing, aux = router(x, balance, valid)
    assert aux is None
    logits = x @ router.weight.T + (router.bias if router.bias is not None else 0.0)
    want = oracle.route(logits, router.config, router.expert_bias, valid)

    for ids, row in zip(routing.expert_ids_TK.tolist(), want, strict=True):
        in_use = [e for e in ids if e >= 0]
        # Expert choice has no order among a token's experts.
        assert in_use == (sorted(row) if router.config.selection == "expert_choice" else list(row))
    assert routing.counts_E.tolist() == [sum(e in row for row in want) for e in range(E)]
    assert routing.counts_E.sum() <= routing.max_rows
    assert (routing.weights_TK[routing.expert_ids_TK < 0] == 0).all()

    # Float64 loops and tensor ops differ in summation order alone: 1e-10 leaves five digits.
    got_dense, want_dense = dense_weights(routing), oracle.dense(want, E)
    torch.testing.assert_close(got_dense, want_dense, rtol=1e-10, atol=1e-12)
    probe = torch.randn(T, E, dtype=torch.float64)
    leaves = [x, *router.parameters()]
    got = torch.autograd.grad((got_dense * probe).sum(), leaves)
    expected = torch.autograd.grad((want_dense * probe).sum(), leaves)
    for g, w in zip(got, expected, strict=True):
        assert w.abs().max() > 1e-4
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


def test_sinkhorn_selects_in_training_only():
    router, balance, x = make(selection="sinkhorn")
    with torch.no_grad():
        x += 3 * router.weight[0]  # Crowd expert 0, so that balancing matters.
    logits = x @ router.weight.T
    training = router(x, balance)[0].expert_ids_TK.tolist()
    evaluated = router.eval()(x, balance)[0].expert_ids_TK.tolist()
    assert training == [list(row) for row in oracle.route(logits, router.config)]
    assert evaluated == [oracle.best(row, 2) for row in logits.tolist()]
    assert training != evaluated


def test_sinkhorn_balances_rows_and_columns():
    logits = torch.randn(64, E, dtype=torch.float64) + torch.arange(E) * 0.5
    use = torch.ones(64, 1, dtype=torch.bool)
    use[50:] = False
    plan = sinkhorn(logits, use)
    # Equal to the loop, hence stopped in the same round.
    want = oracle.balanced_assignment(logits, list(range(50)))
    torch.testing.assert_close(
        plan[:50], torch.tensor([want[t] for t in range(50)], dtype=torch.float64), rtol=1e-10, atol=0
    )
    # Rows end the last round 1e-4 off at most, columns exact.
    torch.testing.assert_close(plan.sum(0), torch.full((E,), 1 / E, dtype=torch.float64))
    torch.testing.assert_close(plan[:50].sum(1), torch.full((50,), 1 / 50, dtype=torch.float64), rtol=1e-3, atol=0)
    assert (plan[50:] == 0).all()


def test_expert_choice_gives_every_expert_its_tokens():
    router, balance, x = make(selection="expert_choice")
    routing, _ = router(x, balance)
    assert routing.counts_E.tolist() == [math.ceil(T * 2 / E)] * E
    assert routing.max_rows == E * math.ceil(T * 2 / E)


@pytest.mark.parametrize("name", VARIANTS)
def test_fault_11_padded_batch_routes_like_the_unpadded_one(name):
    router, balance, x = make(**VARIANTS[name])
    valid = torch.arange(T) < 7
    padded, _ = router(x, balance, valid)
    alone, _ = router(x[:7], balance)
    assert (padded.expert_ids_TK[7:] == -1).all() and (padded.weights_TK[7:] == 0).all()
    torch.testing.assert_close(padded.expert_ids_TK[:7], alone.expert_ids_TK)
    torch.testing.assert_close(padded.weights_TK[:7], alone.weights_TK, rtol=1e-12, atol=0)
    assert padded.counts_E.tolist() == alone.counts_E.tolist()


def test_jitter_scales_the_input_within_its_range_in_training_only():
    router, balance, _ = make(jitter=0.1, score_function="sigmoid", normalize_weights=False)
    x = torch.ones(200, D, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, D))
    noise = router.logits(x)[:, :D]
    assert 0.9 <= noise.min() < 0.905 and 1.095 < noise.max() <= 1.1
    first, second = router(x, balance)[0], router(x, balance)[0]
    assert not torch.equal(first.weights_TK, second.weights_TK)
    router.eval()
    assert torch.equal(router.logits(x)[:, :D], x)


@pytest.mark.parametrize("k", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_equals_the_sort_with_ties_to_the_lower_index(k, dtype):
    torch.manual_seed(0)
    values = torch.randint(-2, 3, (50, 40)).to(dtype)
    values[values == 0] = torch.where(torch.rand(50, 40) < 0.5, 0.0, -0.0)[values == 0].to(dtype)
    assert stable_topk(values, k).tolist() == [oracle.best(row, k) for row in values.tolist()]


@pytest.mark.parametrize("k", [2, 5, 20])
def test_fault_35_nan_and_inf_values_keep_indices_unique_and_prefer_finite(k):
    values = torch.full((6, 20), math.nan)
    values[1] = math.inf
    values[2] = -math.inf
    values[3, 7], values[3, 11] = 1.0, 2.0
    values[4] = torch.tensor([math.nan, -math.inf, math.inf, -3e38] * 5)
    values[5] = torch.arange(20.0)
    picks = stable_topk(values, k).tolist()
    assert all(len(set(row)) == k and min(row) >= 0 and max(row) < 20 for row in picks)
    assert picks[0] == picks[1] == picks[2] == list(range(k))
    assert picks[3][:2] == [11, 7]
    assert set(picks[4][:5]) == {3, 7, 11, 15, 19} or set(picks[4]) < {3, 7, 11, 15, 19}
    assert picks[5] == list(range(19, 19 - k, -1))


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.get("selection", "top_k") == "top_k"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fault_35_bad_logits_prefer_finite_experts_and_show_as_nan(name, bad):
    router, balance, x = make(**VARIANTS[name])
    router.logits = lambda x_TD: logits
    logits = torch.randn(T, E, dtype=torch.float64)
    clean, _ = router(x, balance)
    logits[2, 5] = bad
    logits[4] = bad
    logits[6] = -math.inf
    routing, _ = router(x, balance)
    K = router.config.top_k
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in routing.expert_ids_TK.tolist())
    if K < E:
        assert 5 not in routing.expert_ids_TK[2].tolist()
    assert routing.weights_TK[[2, 4, 6]].isnan().all()
    others = [t for t in range(T) if t not in (2, 4, 6)]
    assert torch.equal(routing.expert_ids_TK[others], clean.expert_ids_TK[others])
    assert torch.equal(routing.weights_TK[others], clean.weights_TK[others])


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", ["expert_choice", "expert_choice_sigmoid"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fault_35_bad_logits_under_expert_choice_show_as_nan(name, bad, padding):
    router, balance, x = make(**VARIANTS[name])
    router.logits = lambda x_TD: logits
    logits = torch.randn(T, E, dtype=torch.float64)
    valid = torch.arange(T) != 9 if padding else None
    logits[2, 5] = bad
    logits[9] = bad
    routing, _ = router(x, balance, valid)
    for token in [2] if padding else [2, 9]:
        assert routing.expert_ids_TK[token].tolist() == list(range(E))
        assert routing.weights_TK[token].isnan().all()
    if padding:
        assert (routing.expert_ids_TK[9] == -1).all() and (routing.weights_TK[9] == 0).all()
    assert routing.weights_TK[[t for t in range(T) if t not in (2, 9)]].isfinite().all()
    assert routing.counts_E.tolist() == [math.ceil((T - padding) * 2 / E)] * E


@pytest.mark.parametrize("name", VARIANTS)
def test_fault_35_constant_logits_lower_index_wins(name):
    router, balance, x = make(**VARIANTS[name])
    with torch.no_grad():
        for tensor in (router.weight, router.bias, router.expert_bias):
            if tensor is not None:
                tensor.zero_()
    ids = router(x, balance)[0].expert_ids_TK
    K = router.config.top_k
    if router.config.selection == "expert_choice":
        taken = math.ceil(T * K / E)
        assert (ids[:taken] == torch.arange(E)).all() and (ids[taken:] == -1).all()
    elif router.config.selection == "round_robin":
        assert ids.flatten().tolist() == [i % E for i in range(T * K)]
    else:
        assert ids.tolist() == [list(range(K))] * T


def test_fault_35_negative_biased_scores_never_select_a_masked_group():
    router, balance, x = make(score_function="sigmoid", expert_bias=True, num_groups=4, topk_groups=2, top_k=4)
    router.expert_bias.fill_(-5.0)
    router.expert_bias[:4] = -4.0
    ids = router(x, balance)[0].expert_ids_TK
    assert (ids < 4).all() and (ids >= 0).all()


def test_weights_ignore_the_selection_bias():
    router, balance, x = make(score_function="sigmoid", expert_bias=True, normalize_weights=False)
    routing, _ = router(x, balance)
    sigmoid = (x @ router.weight.T).sigmoid()
    torch.testing.assert_close(routing.weights_TK, sigmoid.gather(1, routing.expert_ids_TK), rtol=1e-12, atol=0)


def test_sqrtsoftplus_has_a_finite_gradient_where_softplus_underflows():
    logits = torch.tensor([[-2000.0, -30.0, 0.0, 60.0]], requires_grad=True)
    values = score(logits, "sqrtsoftplus")
    values.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 0] == 0
    torch.testing.assert_close(values[0, 2:], torch.tensor([math.sqrt(math.log(2)), math.sqrt(60)]))


def test_sqrtsoftplus_is_exact_for_large_logits():
    logits = torch.tensor([[20.5, 25.0, 49.0, 51.0]], dtype=torch.float64)
    want = [math.sqrt(v + math.log1p(math.exp(-v))) for v in logits[0].tolist()]
    torch.testing.assert_close(score(logits, "sqrtsoftplus")[0].tolist(), want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "to_device_and_dtype", "parent"])
def test_fault_17_router_stays_fp32_bit_exact_through_casts(cast):
    torch.manual_seed(0)
    router = Router(MoEConfig(D, 4, E, 2, score_function="sigmoid", expert_bias=True, router_bias=True))
    with torch.no_grad():
        for tensor in (router.weight, router.bias, router.expert_bias):
            tensor.normal_()
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    model = torch.nn.Sequential(torch.nn.Linear(D, D), router)
    if cast == "parent":
        model.to(torch.bfloat16)
        assert model[0].weight.dtype == torch.bfloat16
    elif cast == "to_device_and_dtype":
        router.to("cpu", torch.bfloat16)
    else:
        getattr(router, cast)()
    assert set(before) == {"weight", "bias", "expert_bias"}
    for name, tensor in router.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name])
    assert isinstance(router.weight, torch.nn.Parameter) and "expert_bias" in dict(router.named_buffers())
    assert router.double().weight.dtype == torch.float64


def test_fault_17_float64_router_stays_float64_and_meta_keeps_dtypes():
    config = MoEConfig(D, 4, E, 2, score_function="sigmoid", expert_bias=True, router_dtype="float64")
    assert Router(config).to(torch.bfloat16).weight.dtype == torch.float64
    with torch.device("meta"):
        router, balance = Router(config), Balance(config)
    router.to(torch.bfloat16).to_empty(device="cpu")
    balance.to(torch.bfloat16).to_empty(device="cpu")
    assert router.weight.dtype == torch.float64 and router.expert_bias.dtype == torch.float32
    assert balance.aux_loss.dtype == torch.float64 and balance.counts_E.dtype == torch.int64
    balance.reset()
    assert balance.counts_E.sum() == 0


def test_router_built_under_a_low_default_dtype_is_fp32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = Router(MoEConfig(D, 4, E, 2, score_function="sigmoid", expert_bias=True, router_bias=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in router.state_dict().values()} == {torch.float32}


def test_routing_maths_is_fp32_for_low_precision_input_and_under_autocast():
    router = Router(MoEConfig(D, 4, E, 2))
    balance, x = Balance(router.config), torch.randn(T, D, dtype=torch.bfloat16)
    want = router(x.float(), balance)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = router(x, balance)[0]
    assert got.weights_TK.dtype == torch.float32
    assert torch.equal(got.weights_TK, want.weights_TK) and torch.equal(got.expert_ids_TK, want.expert_ids_TK)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fields", [{}, {"jitter": 0.3}, {"selection": "sinkhorn"}])
@pytest.mark.parametrize("constant", [True, False])
def test_fault_19_recomputed_forward_routes_like_the_first(constant, fields, reentrant):
    router, balance, x = make(**fields)
    if constant:
        torch.nn.init.zeros_(router.weight)
    seen = []

    def forward(x):
        routing, _ = router(x, balance)
        seen.append(routing)
        return (routing.weights_TK**2 * (1 + routing.expert_ids_TK)).sum()

    checkpoint(forward, x, use_reentrant=reentrant).backward()
    first, second = seen
    assert torch.equal(first.expert_ids_TK, second.expert_ids_TK)
    assert torch.equal(first.weights_TK, second.weights_TK)


@pytest.mark.parametrize("name", VARIANTS)
def test_fault_37_two_runs_are_bitwise_equal(name):
    def run():
        router, balance, x = make(**VARIANTS[name])
        routing, _ = router(x, balance)
        (routing.weights_TK**2).sum().backward()
        return routing.expert_ids_TK, routing.weights_TK, x.grad, router.weight.grad

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


LOSSES = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.2, "global_aux_loss_coef": 0.3}


def with_losses(fields: dict) -> dict:
    balanced = fields.get("selection") in ("sinkhorn", "expert_choice")
    return {**fields, "z_loss_coef": 0.01, **({} if balanced else LOSSES)}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_fault_38_no_tokens(name, padding):
    router, balance, _ = make(**with_losses(VARIANTS[name]))
    x = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    valid = torch.zeros(0, dtype=torch.bool) if padding else None
    routing, aux = router(x, balance, valid)
    assert routing.expert_ids_TK.shape == routing.weights_TK.shape and routing.expert_ids_TK.shape[0] == 0
    assert routing.counts_E.tolist() == [0] * E and routing.max_rows == 0
    (routing.weights_TK.sum() + aux).backward()
    assert x.grad.shape == (0, D) and (router.weight.grad == 0).all() and aux == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_fault_14_a_single_token(name):
    router, balance, x = make(**with_losses(VARIANTS[name]))
    routing, aux = router(x[:1], balance)
    (want,) = oracle.route(
        x[:1] @ router.weight.T + (0.0 if router.bias is None else router.bias), router.config, router.expert_bias
    )
    assert sorted(routing.expert_ids_TK[0].tolist()) == sorted(want)
    torch.testing.assert_close(dense_weights(routing), oracle.dense([want], E), rtol=1e-10, atol=0)
    assert aux.isfinite()


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_no_host_sync_in_forward_and_backward(name, padding, policy, device):
    # .item(), nonzero and boolean indexing raise on fake tensors; a tensor left on the CPU clashes with meta ones.
    mode, device = (FakeTensorMode(), "cpu") if device == "fake" else (contextlib.nullcontext(), "meta")
    fields = with_losses(VARIANTS[name])
    if fields.get("selection") != "expert_choice":
        fields |= {"capacity_factor": 1.25, "drop_policy": policy, "pad_to_capacity": True}
    config = MoEConfig(**{"dim": D, "hidden_dim": 4, "num_experts": E, "top_k": 2, "jitter": 0.1, **fields})
    with mode, torch.device(device):
        router, balance = Router(config), Balance(config)
        balance.token_weight = torch.ones(())
        x = torch.randn(2 * T, D, requires_grad=True)
        valid = torch.ones(2 * T, dtype=torch.bool) if padding else None
        routing, aux = router(x, balance, valid, 1)
        routing = pad_counts(apply_capacity(routing, config, valid), 16, valid)
        y = balance.inject(routing.weights_TK.sum() * x, aux)
        y.sum().backward()
        assert router.weight.grad.shape == (E, D) and routing.counts_E.device.type == device


REFUSED = {
    "num_experts": ({"num_experts": 0}, "at least 1"),
    "top_k beyond experts": ({"top_k": 9}, "Set top_k to at most 8"),
    "groups do not divide": ({"num_groups": 3}, "num_groups = 3 does not divide"),
    "too many groups kept": ({"num_groups": 2, "topk_groups": 3}, "topk_groups = 3 is more than num_groups = 2"),
    "groups kept without groups": ({"topk_groups": 2}, "topk_groups"),
    "top_k beyond kept groups": ({"num_groups": 4, "topk_groups": 1, "top_k": 3}, "Set topk_groups to at least 2"),
    "group score beyond group": ({"num_groups": 4, "topk_groups": 2, "group_score_k": 3}, "at most 2"),
    "zero mask with bias": (
        {"num_groups": 4, "topk_groups": 2, "group_mask": "zero", "expert_bias": True},
        "Set group_mask = '-inf'",
    ),
    "constant weight": ({"top_k": 1}, "no router gradient"),
    "sinkhorn with aux": ({"selection": "sinkhorn", "aux_loss_coef": 0.1}, "aux_loss_coef"),
    "sinkhorn with seq aux": ({"selection": "sinkhorn", "seq_aux_loss_coef": 0.1}, "seq_aux_loss_coef"),
    "sinkhorn with global aux": ({"selection": "sinkhorn", "global_aux_loss_coef": 0.1}, "global_aux_loss_coef"),
    "expert choice with bias": ({"selection": "expert_choice", "expert_bias": True}, "expert_bias"),
    "expert choice with groups": ({"selection": "expert_choice", "num_groups": 4, "topk_groups": 2}, "num_groups"),
    "expert choice with capacity": ({"selection": "expert_choice", "capacity_factor": 1.0}, "capacity_factor"),
    "pad without capacity": ({"pad_to_capacity": True}, "Set capacity_factor"),
    "capacity 0": ({"capacity_factor": 0.0}, "more than 0"),
    "capacity nan": ({"capacity_factor": math.nan}, "more than 0"),
    "pad_counts_to": ({"pad_counts_to": 0}, "pad_counts_to = 0"),
    "negative aux": ({"aux_loss_coef": -0.1}, "aux_loss_coef = -0.1"),
    "negative z": ({"z_loss_coef": -1e-3}, "z_loss_coef"),
    "infinite global": ({"global_aux_loss_coef": math.inf}, "finite"),
    "negative bias speed": ({"bias_update_speed": -1.0}, "bias_update_speed"),
    "route scale": ({"route_scale": 0.0}, "route_scale"),
    "jitter": ({"jitter": 1.0}, "in [0, 1)"),
    "negative jitter": ({"jitter": -0.1}, "in [0, 1)"),
    "latent": ({"latent_dim": 0}, "latent_dim = 0"),
    "shared": ({"shared_hidden_dim": -1}, "shared_hidden_dim"),
    "gate without shared": ({"shared_gate": True}, "Set shared_hidden_dim"),
    "score name": ({"score_function": "sigmod"}, "Did you mean 'sigmoid'"),
    "selection name": ({"selection": "topk"}, "Did you mean 'top_k'"),
    "pad_counts_to beyond int64": ({"pad_counts_to": 10**30}, "to 65536"),
    **{
        f"{name} = {value!r}": ({name: value}, f"{name} = {value!r}: expected {kind}.")
        for name, value, kind in (
            ("dim", None, "a whole number (int)"),
            ("dim", 12.5, "a whole number (int)"),
            ("num_experts", 6.0, "a whole number (int)"),
            ("top_k", "2", "a whole number (int)"),
            ("top_k", True, "a whole number (int)"),
            ("pad_counts_to", 2.5, "a whole number (int)"),
            ("jitter", None, "a number (float)"),
            ("aux_loss_coef", False, "a number (float)"),
            ("route_scale", 10**400, "a number (float)"),
            ("capacity_factor", "1", "a number (float) or None"),
            ("latent_dim", 2.0, "a whole number (int) or None"),
            ("normalize_weights", "no", "true or false (bool)"),
            ("expert_bias", 1, "true or false (bool)"),
        )
    },
    "score of no type": ({"score_function": None}, "score_function = None: expected one of 'softmax'"),
    "padded biased experts": (
        {"weight_on": "input", "expert_linear_bias": True, "pad_counts_to": 16},
        "Set weight_on = 'activation'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_refuses_in_one_line_with_the_way_out(case):
    fields, message = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        MoEConfig(**{"dim": D, "hidden_dim": 4, "num_experts": E, "top_k": 2, **fields})
    assert message in str(error.value) and "\n" not in str(error.value)
