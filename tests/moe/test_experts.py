"""The experts' operator against a loop in float64, its edge cases, and what it saves."""

import pytest
import torch
from oracle_layer import oracle_experts
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from titan_moe.kernels.activation import Activation, activate
from titan_moe.kernels.combine import combine
from titan_moe.kernels.grouped_mm import grouped_mm
from titan_moe.kernels.permute import permute
from titan_moe.kernels.route_map import offsets_of, route_map
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.experts import Experts
from titan_moe.moe.routing import count_experts

ACTIVATIONS = ["swiglu", "geglu", "relu2", "clamped_swiglu"]


def build(dtype=torch.float64, seed=0, std=0.5, **overrides):
    """Experts with every parameter random, biases too."""
    torch.manual_seed(seed)
    config = MoEConfig(**{"dim": 8, "hidden_dim": 12, "num_experts": 4, "top_k": 2, **overrides})
    experts = Experts(config).to(dtype)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=std)
    return config, experts


def random_rows(sizes, dim, dtype=torch.float64, tail=0):
    rows = torch.randn(sum(sizes) + tail, dim, dtype=dtype, requires_grad=True)
    weights = torch.rand(sum(sizes) + tail, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    return rows, torch.tensor(sizes), weights


def run(experts, rows, counts, weights, dy):
    """Output and gradients of rows, weights and all parameters, as a dict."""
    y = experts(rows, counts, weights)
    names, parameters = zip(*experts.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, [rows, weights, *parameters], dy)
    return dict(zip(["y", "rows", "weights", *names], [y.detach(), *grads], strict=True))


def run_oracle(experts, rows, counts, weights, dy):
    """The same in float64 by the loop of ``oracle_experts``."""
    parameters = {k: v.detach().double().requires_grad_() for k, v in experts.named_parameters()}
    x = rows.detach().double().requires_grad_()
    w = weights.detach().double().requires_grad_()
    expert_of_rows = [e for e, size in enumerate(counts.tolist()) for _ in range(size)]
    y = oracle_experts(x, expert_of_rows, w, parameters, experts.activation, experts.weight_on)
    grads = torch.autograd.grad(y, [x, w, *parameters.values()], dy.double())
    return dict(zip(["y", "rows", "weights", *parameters], [y.detach(), *grads], strict=True))


def assert_close(actual, expected, atol, rtol=0.0):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].double(), value.double(), atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("backend", ["grouped", "sequential"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight_on", ["activation", "input"])
def test_float64_equals_the_loop_in_value_and_every_gradient(backend, activation, bias, weight_on):
    # limit 0.6 puts both clamps to work at these magnitudes
    _, experts = build(
        activation=activation, expert_linear_bias=bias, weight_on=weight_on, experts=backend, activation_limit=0.6
    )
    rows, counts, weights = random_rows([5, 0, 3, 9], 8)
    dy = torch.randn(17, 8, dtype=torch.float64)
    assert_close(run(experts, rows, counts, weights, dy), run_oracle(experts, rows, counts, weights, dy), atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_equals_float64_to_rounding(activation, bias):
    _, experts = build(torch.float32, activation=activation, expert_linear_bias=bias, dim=16, hidden_dim=24)
    rows, counts, weights = random_rows([5, 0, 3, 9], 16, torch.float32)
    dy = torch.randn(17, 16)
    # Sums of at most 48 products of magnitude up to about 10: 48 x 10 x 2^-24 = 3e-5.
    assert_close(run(experts, rows, counts, weights, dy), run_oracle(experts, rows, counts, weights, dy), 3e-5, 1e-5)


@pytest.mark.parametrize("dtype, eps", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_within_a_few_roundings(dtype, eps):
    _, experts = build(dtype, expert_linear_bias=True, dim=16, hidden_dim=24, std=0.3)
    rows, counts, weights = random_rows([5, 0, 3, 9], 16, dtype)
    dy = torch.randn(17, 16).to(dtype)
    actual, expected = (f(experts, rows, counts, weights, dy) for f in (run, run_oracle))
    for name, value in expected.items():
        assert actual[name].dtype == (torch.float32 if name == "weights" else dtype), name
        # Each of the at most four chained roundings (z, a, da, dz) costs eps of the tensor's scale.
        error = (actual[name].double() - value).norm() / value.norm()
        assert error < 4 * eps, (name, error)


@pytest.mark.parametrize("weight_on", ["activation", "input"])
def test_float64_routing_weights_on_float32_experts(weight_on):
    """As router_dtype = "float64" gives: the weight's gradient keeps its dtype."""
    _, experts = build(torch.float32, expert_linear_bias=True, weight_on=weight_on)
    rows, counts, weights = random_rows([5, 0, 3, 9], 8, torch.float32)
    weights = weights.detach().double().requires_grad_()
    dy = torch.randn(17, 8)
    actual = run(experts, rows, counts, weights, dy)
    assert actual["weights"].dtype == torch.float64 and actual["y"].dtype == torch.float32
    # Sums of at most 24 products of magnitude up to about 10 in fp32.
    assert_close(actual, run_oracle(experts, rows, counts, weights, dy), 3e-5, 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_passes_gradcheck(activation):
    torch.manual_seed(0)
    z = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: activate(z, Activation(activation, limit=0.7)), z)


def test_clamped_swiglu_by_hand():
    act = Activation("clamped_swiglu", limit=7.0, alpha=1.702)
    z = torch.tensor([[9.0, -8.0]], dtype=torch.float64)  # gate 9 -> 7, up -8 -> -7
    expected = (-7 + 1) * 7 / (1 + torch.tensor(-1.702 * 7, dtype=torch.float64).exp())
    torch.testing.assert_close(activate(z, act), expected.view(1, 1), atol=1e-14, rtol=0)


def test_geglu_is_the_exact_gelu():
    z = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    phi = 0.5 * (1 + torch.erf(torch.tensor(0.5, dtype=torch.float64).sqrt()))
    torch.testing.assert_close(activate(z, Activation("geglu")), (2 * phi).view(1, 1), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_fault_33_rows_past_the_last_offset_are_nan(dtype, bias):
    """NaN in unused rows, weights and incoming gradients reaches nothing, over two steps."""
    _, experts = build(dtype, expert_linear_bias=bias)
    rows, counts, weights = random_rows([3, 0, 4, 2], 8, dtype, tail=3)
    dy = torch.randn(12, 8, dtype=dtype)
    clean = run(experts, rows[:9].detach().requires_grad_(), counts, weights[:9].detach().requires_grad_(), dy[:9])
    with torch.no_grad():
        for t in (rows, weights, dy):
            t[9:] = float("nan")
    for _ in range(2):
        poisoned = run(experts, rows, counts, weights, dy)
        for name in ("y", "rows", "weights"):
            assert (poisoned[name][9:] == 0).all(), name
            poisoned[name] = poisoned[name][:9]
        assert_close(poisoned, clean, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fault_33_empty_expert_has_zero_weight_gradient_under_poisoned_memory(dtype):
    """With freshly allocated memory full of NaN, gradients of an expert without rows are exactly 0."""
    _, experts = build(dtype, expert_linear_bias=True)
    rows, counts, weights = random_rows([0, 3, 0, 6], 8, dtype)
    torch.use_deterministic_algorithms(True)  # makes torch.empty fill with NaN
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(4).isnan().all()
        grads = run(experts, rows, counts, weights, torch.randn(9, 8, dtype=dtype))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    for name in ("w1", "w2", "b1", "b2"):
        assert (grads[name][[0, 2]] == 0).all(), name
        assert grads[name][[1, 3]].isfinite().all() and grads[name][[1, 3]].abs().sum() > 0, name


@pytest.mark.parametrize("sizes", [[0, 1, 7, 8], [31, 33, 0, 0], [44, 0, 7, 0], [0, 0, 0, 0], [0, 0, 0, 5]])
def test_fault_34_group_sizes(sizes):
    _, experts = build(torch.float32, dim=8, hidden_dim=8)
    rows, counts, weights = random_rows(sizes, 8, torch.float32)
    dy = torch.randn(sum(sizes), 8)
    # At most 51 rows of magnitude 10 summed in fp32.
    assert_close(run(experts, rows, counts, weights, dy), run_oracle(experts, rows, counts, weights, dy), 1e-4, 1e-5)


def test_an_expert_with_more_rows_than_are_computed_at_once():
    _, experts = build(expert_linear_bias=True, dim=4, hidden_dim=3)
    rows, counts, weights = random_rows([1100, 0, 3, 520], 4)
    dy = torch.randn(1623, 4, dtype=torch.float64)
    assert_close(run(experts, rows, counts, weights, dy), run_oracle(experts, rows, counts, weights, dy), atol=1e-10)


@pytest.mark.parametrize("dim, hidden", [(5, 7), (6, 3), (1, 1)])
def test_dims_that_are_no_multiple_of_16_bytes(dim, hidden):
    _, experts = build(torch.float32, dim=dim, hidden_dim=hidden)
    rows, counts, weights = random_rows([2, 0, 3, 1], dim, torch.float32)
    dy = torch.randn(6, dim)
    assert_close(run(experts, rows, counts, weights, dy), run_oracle(experts, rows, counts, weights, dy), 1e-5, 1e-5)


def awkward(dy, kind):
    """The same values with strides that are not the plain ones."""
    if kind == "transpose":
        return dy.t().contiguous().t()
    if kind == "offset":
        return torch.cat([dy.new_full((1,), 7.0), dy.flatten()])[1:].view_as(dy)
    if kind == "cat":
        return torch.cat([dy, dy], dim=1)[:, : dy.shape[1]]
    assert kind == "expand"
    return dy[:1].expand_as(dy)


@pytest.mark.parametrize("kind", ["transpose", "offset", "cat", "expand"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fault_36_gradients_with_any_strides(kind, dtype):
    _, experts = build(dtype, expert_linear_bias=True)
    rows, counts, weights = random_rows([3, 0, 4, 2], 8, dtype)
    dy = awkward(torch.randn(9, 8, dtype=dtype), kind)
    expected = run(experts, rows, counts, weights, dy.clone(memory_format=torch.contiguous_format))
    assert_close(run(experts, rows, counts, weights, dy), expected, atol=1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("kind", ["transpose", "offset", "cat"])
def test_fault_36_input_with_any_strides(kind):
    _, experts = build(torch.float32)
    rows, counts, weights = random_rows([3, 0, 4, 2], 8, torch.float32)
    dy = torch.randn(9, 8)
    expected = run(experts, rows, counts, weights, dy)
    strided = awkward(rows.detach(), kind).requires_grad_()
    # A misaligned view takes another product routine, which may sum in another order.
    assert_close(run(experts, strided, counts, weights, dy), expected, atol=1e-5)


def test_fault_36_sum_backward_gives_an_expanded_gradient():
    _, experts = build(torch.float32)
    rows, counts, weights = random_rows([3, 0, 4, 2], 8, torch.float32)
    experts(rows, counts, weights).sum().backward()
    expected = run_oracle(experts, rows, counts, weights, torch.ones(9, 8))
    torch.testing.assert_close(rows.grad.double(), expected["rows"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["grouped", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fault_38_no_rows(backend, dtype):
    _, experts = build(dtype, expert_linear_bias=True, experts=backend)
    rows, counts, weights = random_rows([0, 0, 0, 0], 8, dtype)
    grads = run(experts, rows, counts, weights, torch.empty(0, 8, dtype=dtype))
    assert grads["y"].shape == (0, 8)
    for name, parameter in experts.named_parameters():
        assert grads[name].shape == parameter.shape and (grads[name] == 0).all()


def test_fault_37_two_runs_are_bitwise_equal():
    _, experts = build(torch.float32, expert_linear_bias=True, dim=32, hidden_dim=48)
    rows, counts, weights = random_rows([40, 1, 0, 87], 32, torch.float32)
    dy = torch.randn(128, 32)
    first, second = (run(experts, rows, counts, weights, dy) for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_experts_never_ask_the_host(dtype):
    """Fake tensors have no values: reading one, or a shape that depends on one, raises."""
    E, K, T, D = 4, 2, 16, 8
    config = MoEConfig(D, 16, E, K, expert_linear_bias=True)
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            experts = Experts(config)
        finally:
            torch.set_default_dtype(torch.float32)
        x = torch.randn(T, D, dtype=dtype, requires_grad=True)
        ids = torch.randint(-1, E, (T, K))
        counts = count_experts(ids, E)
        weights = torch.rand(T, K, requires_grad=True)
        experts(x, counts, weights, route_map(ids, counts, T * K)).sum().backward()
        assert x.grad.shape == x.shape and experts.w1.grad.shape == experts.w1.shape
        with pytest.raises(DataDependentOutputException):  # the detector works
            counts.tolist()


def test_grouped_mm_matches_products_by_hand():
    a, b = torch.randn(6, 4), torch.randn(3, 4, 8)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    out = grouped_mm(a, b, offsets)
    torch.testing.assert_close(out[:2], a[:2] @ b[0])
    torch.testing.assert_close(out[2:5], a[2:5] @ b[2])
    dw = grouped_mm(a.t(), out.nan_to_num(), offsets)
    torch.testing.assert_close(dw[0], a[:2].t() @ out[:2])
    assert (dw[1] == 0).all()
    torch.testing.assert_close(dw[2], a[2:5].t() @ out[2:5])


def test_permute_and_combine_are_each_others_backward():
    ids = torch.tensor([[2, 0], [-1, 2], [0, -1], [1, 2]])
    counts = torch.tensor([2, 1, 3])
    map_ = route_map(ids, counts, 8)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = permute(x, map_)
    assert torch.equal(rows[:6], x[[0, 2, 3, 0, 1, 3]])
    torch.autograd.grad(rows, x, torch.full_like(rows, float("nan")), retain_graph=True)
    dy = torch.randn(9, 3, dtype=torch.float64)
    dy[6:] = float("nan")
    (dx,) = torch.autograd.grad(rows, x, dy)
    torch.testing.assert_close(dx, torch.stack([dy[3] + dy[0], dy[4], dy[1], dy[2] + dy[5]]), atol=1e-15, rtol=0)
    y = dy.clone().nan_to_num(0).requires_grad_()
    out = combine(y, map_)
    torch.testing.assert_close(out, dx, atol=1e-15, rtol=0)
    do = torch.randn(4, 3, dtype=torch.float64)
    (dy_,) = torch.autograd.grad(out, y, do)
    assert torch.equal(dy_[:6], do[[0, 2, 3, 0, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_combine_accumulates_in_fp32(dtype):
    K = 256
    ids = torch.arange(K)[None]
    map_ = route_map(ids, torch.ones(K, dtype=torch.int64), K)
    y = torch.cat([torch.full((K, 8), 1 / 3), torch.zeros(1, 8)]).to(dtype)
    # In half precision the running sum would stop growing long before 85.
    torch.testing.assert_close(combine(y, map_), y.float().sum(0, keepdim=True).to(dtype), atol=0, rtol=0)


def test_names_do_not_depend_on_the_backend():
    for bias in (False, True):
        names = [
            [(k, p.shape) for k, p in build(experts=backend, expert_linear_bias=bias)[1].named_parameters()]
            for backend in ("grouped", "sequential")
        ]
        assert names[0] == names[1]
    assert dict(names[0])["w1"] == (4, 2, 12, 8) and dict(names[0])["b2"] == (4, 8)
    assert build(activation="relu2")[1].w1.shape == (4, 1, 12, 8)


def test_built_on_meta_allocates_nothing_and_elsewhere_is_filled():
    config = MoEConfig(8, 12, 4, 2, expert_linear_bias=True)
    with torch.device("meta"):
        assert all(p.is_meta for p in Experts(config).parameters())
    torch.manual_seed(0)
    experts = Experts(config)
    assert 0.015 < experts.w1.std() < 0.025 and (experts.b1 == 0).all()


def saved_bytes(function, parameters):
    """Bytes kept for backward, each storage once, parameters excluded."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    storages = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return sum(storages.values())


def test_saved_bytes_are_the_input_and_the_pre_activation():
    """Per token D + 2KF elements, with indices and weights besides; the plain graph of the loop keeps far more."""
    T, D, F_, E, K = 64, 64, 96, 4, 2
    config = MoEConfig(D, F_, E, K)
    x = torch.randn(T, D, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    counts = (ids[..., None] == torch.arange(E)).sum((0, 1))
    weights = torch.rand(T, K, requires_grad=True)

    def forward(experts):
        return experts(x, counts, weights, route_map(ids, counts, T * K))

    per_token = {}
    for backend in ("grouped", "sequential"):
        config.experts = backend
        experts = Experts(config)
        per_token[backend] = saved_bytes(lambda experts=experts: forward(experts), experts.parameters()) / T
    bound = 4 * (D + 2 * K * F_)
    # int64 indices in three arrays and the fp32 weight: 28 bytes per row; one spare row of everything.
    slack = 28 * K + 4 * E + (4 * 2 * F_ + 28) / T + 8
    assert bound <= per_token["grouped"] <= bound + slack
    assert per_token["grouped"] < 0.55 * per_token["sequential"]


def test_offsets_are_int32_ends():
    assert offsets_of(torch.tensor([2, 0, 3])).tolist() == [2, 2, 5]
    assert offsets_of(torch.tensor([2])).dtype == torch.int32
