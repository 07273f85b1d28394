"""The experts' kernels in Triton's interpreter: each against float64 loops, then all of them in the operator."""

import pytest
import torch
from expert_case import ExpertCase
from interpreter import backend, by_triton, within_one_rounding
from oracle_layer import oracle_expert

from titan_moe.kernels.down import down
from titan_moe.kernels.down_dgrad import down_dgrad
from titan_moe.kernels.gather_up import gather_up
from titan_moe.kernels.grouped_mlp import grouped_mlp
from titan_moe.kernels.up_dgrad import up_dgrad
from titan_moe.kernels.wgrad import wgrad

# Activation, biases, weight on the input.
VARIANTS = [
    ("swiglu", False, "activation"),
    ("geglu", True, "activation"),
    ("relu2", False, "input"),
    ("relu2", True, "activation"),
    ("clamped_swiglu", True, "activation"),
    ("swiglu", True, "input"),
]
ALL = [
    (kind, bias, on)
    for kind in ("swiglu", "geglu", "relu2", "clamped_swiglu")
    for bias in (False, True)
    for on in ("activation", "input")
]
# Sums of at most 24 + 1 products of magnitude up to 4, in fp32 twice: 2 x 100 x 2^-24.
SLACK = 1.2e-5


def case_of(variant, dtype=torch.float32, **sizes):
    kind, bias, weight_on = variant
    return ExpertCase(kind=kind, bias=bias, weight_on=weight_on, dtype=dtype, **sizes)


def padded(case, rows):
    """Values of the used rows in a buffer whose other rows are NaN."""
    out = torch.full((case.T * case.K + 1, rows.shape[1]), float("nan"), dtype=case.dtype)
    out[: len(rows)] = rows.to(case.dtype)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gather_up(variant, dtype):
    case = case_of(variant, dtype)
    m, want, n = case.map(), case.by_row(), len(case.rows)

    def run():
        z, a = gather_up(
            case.x, case.p["w1"], case.p.get("b1"), case.weights, m.slot_of_R, m.offsets_E, m.tiles, case.K, *case.kinds
        )
        return z[:n], a[:n]

    z, a = by_triton(run)
    within_one_rounding(z, want["z"], SLACK)
    within_one_rounding(a, want["a"], SLACK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weigh", [None, False, True])
def test_down(weigh, dtype):
    case = case_of(("swiglu", weigh is not None, "activation" if weigh else "input"), dtype)
    m, n = case.map(), len(case.rows)
    a = padded(case, case.by_row()["a"])
    want = [case.p["w2"][e].double() @ a[r].double() for r, (e, _, _) in enumerate(case.rows)]
    if weigh is not None:
        for y, (e, t, k) in zip(want, case.rows, strict=True):
            y += case.p["b2"][e].double() * (case.weights[t, k].double() if weigh else 1)

    def run():
        bias = case.p.get("b2")
        return down(a, case.p["w2"], bias, case.weights, m.slot_of_R, m.offsets_E, m.tiles, bool(weigh))[:n]

    within_one_rounding(by_triton(run), torch.stack(want), SLACK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_down_dgrad(variant, dtype):
    case = case_of(variant, dtype)
    m, want, n = case.map(), case.by_row(), len(case.rows)
    z = padded(case, want["z"])

    def run():
        dz, sa, partials = down_dgrad(
            case.do,
            case.p["w2"],
            z,
            case.p.get("b1") if case.on_input else None,
            case.p.get("b2"),
            case.weights,
            m.slot_of_R,
            m.offsets_E,
            m.tiles,
            case.K,
            *case.kinds,
        )
        return dz[:n], sa[:n], partials[:n]

    dz, sa, partials = by_triton(run)
    assert partials.dtype == torch.float32
    if dtype == torch.float32:
        within_one_rounding(dz, want["dz"], SLACK)
        within_one_rounding(sa, want["sa"], SLACK)
        torch.testing.assert_close(partials.double().sum(1), want["dweight"], atol=5 * SLACK, rtol=0)
        return
    # From here on z is rounded: its error of 2^-9 relative passes through the activation's bounded slopes.
    for got, exact in ((dz, want["dz"]), (sa, want["sa"]), (partials.sum(1), want["dweight"])):
        assert (got.double() - exact).norm() < 2 * 2**-8 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_input", [False, True])
def test_up_dgrad(on_input, dtype):
    case = case_of(("swiglu", False, "input" if on_input else "activation"), dtype)
    m, n = case.map(), len(case.rows)
    dz = padded(case, case.by_row()["dz"])
    want = []
    for r, (e, t, k) in enumerate(case.rows):
        dx = case.p["w1"][e].flatten(0, 1).double().T @ dz[r].double()
        want.append(dx * case.weights[t, k].double() if on_input else dx)

    def run():
        return up_dgrad(dz, case.p["w1"], case.weights, m.slot_of_R, m.offsets_E, m.tiles, on_input)[:n]

    within_one_rounding(by_triton(run), torch.stack(want), SLACK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weigh", [False, True])
def test_wgrad_of_the_second_linear(weigh, dtype):
    case = ExpertCase(bias=True, dtype=dtype)
    m, sa = case.map(), padded(case, case.by_row()["sa"])

    def run():
        return wgrad(case.do, sa, case.weights, m.slot_of_R, m.offsets_E, case.K, True, False, False, True, weigh, None)

    dw, db = by_triton(run)
    within_one_rounding(dw, case.by_expert(case.do, sa[: len(case.rows)]), SLACK)
    one = torch.ones(case.T, 1)
    within_one_rounding(db, case.by_expert(case.do, one, "weight" if weigh else None)[..., 0], SLACK)
    assert (dw[1] == 0).all() and (db[1] == 0).all() and (case.ids != 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_of_the_first_linear(dtype):
    case = ExpertCase(dtype=dtype)
    m, dz = case.map(), padded(case, case.by_row()["dz"])

    def run():
        return wgrad(dz, case.x, case.weights, m.slot_of_R, m.offsets_E, case.K, False, True, False, True, False, None)

    dw, db = by_triton(run)
    rows = dz[: len(case.rows)]
    within_one_rounding(dw, case.by_expert(rows, case.x), SLACK)
    within_one_rounding(db, case.by_expert(rows, torch.ones(case.T, 1))[..., 0], SLACK)


def test_wgrad_rounds_the_weighted_input_as_the_product_reads_it():
    case = ExpertCase(dtype=torch.bfloat16, weight_on="input")
    m, dz = case.map(), padded(case, case.by_row()["dz"])

    def run():
        return wgrad(dz, case.x, case.weights, m.slot_of_R, m.offsets_E, case.K, False, True, True, False, False, None)

    exact = case.by_expert(dz[: len(case.rows)], case.x, "weight")
    # Each weighted input is rounded to bfloat16, then the sum.
    assert (by_triton(run)[0].double() - exact).norm() < 2 * 2**-8 * exact.norm()


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_adds_into_fp32_main_gradients(name, dtype):
    case = ExpertCase(dtype=dtype)
    sa = padded(case, case.by_row()["sa"])
    sa[len(case.rows) :] = 0  # torch's product may read what follows the last group
    before = torch.randn(case.E, case.D, case.F)

    def run():
        m, into = case.map(), before.clone()
        wgrad(case.do, sa, case.weights, m.slot_of_R, m.offsets_E, case.K, True, False, False, False, False, into)
        return into

    with backend(name):
        got = by_triton(run) if name == "triton" else run()
    exact = before.double() + case.by_expert(case.do, sa[: len(case.rows)])
    # In torch the product is rounded to bfloat16 before it is added.
    slack = SLACK if name == "triton" or dtype == torch.float32 else 2**-8 * exact.abs().max().item()
    within_one_rounding(got, exact, slack)
    assert torch.equal(got[1], before[1])


def gradients(case, dtype=None):
    """Output and all gradients of the operator."""
    leaves = {name: t.clone().requires_grad_() for name, t in {"x": case.x, "weights": case.weights, **case.p}.items()}
    m = case.map()
    y = grouped_mlp(
        *(leaves["x"], leaves["w1"], leaves["w2"], leaves.get("b1"), leaves.get("b2"), leaves["weights"]),
        *(m.offsets_E, case.act, case.weight_on, m),
    )
    grads = torch.autograd.grad(y, list(leaves.values()), case.do)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def oracle_gradients(case):
    """The same by a loop over rows, in float64."""
    wide = {"x": case.x, "weights": case.weights, **case.p}
    leaves = {name: t.detach().double().requires_grad_() for name, t in wide.items()}
    p = {name: leaves[name] for name in case.p}
    out = [torch.zeros(case.D, dtype=torch.float64) for _ in range(case.T)]
    for e, t, k in case.rows:
        out[t] = out[t] + oracle_expert(leaves["x"][t], e, leaves["weights"][t, k], p, case.act, case.weight_on)
    y = torch.stack(out) if out else leaves["x"] * 0
    anchor = sum(leaf.sum() for leaf in leaves.values()) * 0
    grads = torch.autograd.grad(((y + anchor) * case.do.double()).sum(), list(leaves.values()))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_close(got, want, atol):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name].double(), want[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("variant", ALL, ids=str)
def test_operator_in_float64_equals_the_loop(variant, name):
    case = case_of(variant, torch.float64, weight_dtype=torch.float64, T=11, D=18, F=17)
    with backend(name):
        got = gradients(case)
    assert_close(got, oracle_gradients(case), 1e-12)
    for part in case.p:
        assert (got[part][1] == 0).all()  # the expert without tokens


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_operator_in_float32(variant):
    case = case_of(variant)
    got = by_triton(gradients, case)
    # Chains of three sums of at most 26 products of magnitude up to 10: 3 x 260 x 2^-24 x a margin of 2.
    assert_close(got, oracle_gradients(case), 1e-4)


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
def test_operator_in_bfloat16(variant):
    case = case_of(variant, torch.bfloat16)
    with backend("triton"):
        got = gradients(case)
    for name, want in oracle_gradients(case).items():
        # At most four chained roundings (z, a, dz, dx) of 2^-8 of the tensor's scale, and that of the input's weight.
        assert (got[name].double() - want).norm() < 5 * 2**-8 * want.norm(), name


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("sizes", [[0, 1, 7, 8], [31, 33, 0], [0, 0, 5]])
def test_fault_34_rows_without_a_map(name, sizes):
    """Rows that are sorted already, NaN after them: results and gradients there are zero."""
    torch.manual_seed(0)
    n, E = sum(sizes), len(sizes)
    case = ExpertCase(T=n + 3, K=1, E=E, bias=True, dtype=torch.float64, weight_dtype=torch.float64)
    offsets = torch.tensor(sizes).cumsum(0).int()
    case.ids = torch.tensor([e for e, size in enumerate(sizes) for _ in range(size)] + [-1] * 3)[:, None]
    case.rows = [(e, t, 0) for t, e in enumerate(case.ids[:, 0].tolist()) if e >= 0]
    want = oracle_gradients(case)
    for t in (case.x, case.do, case.weights):
        t[n:] = float("nan")
    leaves = {name: t.clone().requires_grad_() for name, t in {"x": case.x, "weights": case.weights, **case.p}.items()}
    with backend(name):
        y = grouped_mlp(
            *(leaves["x"], leaves["w1"], leaves["w2"], leaves["b1"], leaves["b2"], leaves["weights"][:, 0]),
            *(offsets, case.act),
        )
        grads = torch.autograd.grad(y, list(leaves.values()), case.do)
    assert_close({"y": y.detach(), **dict(zip(leaves, grads, strict=True))}, want, 1e-12)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_fault_38_no_tokens_in_the_operator(name):
    case = ExpertCase(T=0, bias=True)
    with backend(name):
        got = gradients(case)
    assert got["y"].shape == got["x"].shape == (0, case.D)
    assert all((got[name] == 0).all() for name in case.p)


@pytest.mark.parametrize("kind", ["transpose", "offset", "expand"])
def test_fault_36_gradients_with_any_strides(kind):
    case = ExpertCase(T=7)
    with backend("triton"):
        want = gradients(case)
        plain = case.do
        if kind == "transpose":
            case.do = plain.t().contiguous().t()
        elif kind == "offset":
            case.do = torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view_as(plain)
        else:
            case.do = plain[:1].expand_as(plain)
            want = {**want, **gradients_of_contiguous(case)}
        got = gradients(case)
    assert all(torch.equal(got[name], want[name]) for name in want)


def gradients_of_contiguous(case):
    case.do, kept = case.do.contiguous(), case.do
    want = gradients(case)
    case.do = kept
    return want


def test_frozen_input_needs_no_gradient():
    case = ExpertCase(T=7)
    with backend("triton"):
        want, m = gradients(case), case.map()
        leaves = [t.clone().requires_grad_() for t in (case.p["w1"], case.p["w2"], case.weights)]
        y = grouped_mlp(case.x, *leaves[:2], None, None, leaves[2], m.offsets_E, case.act, route_map=m)
        got = torch.autograd.grad(y, leaves, case.do)
    for grad, name in zip(got, ("w1", "w2", "weights"), strict=True):
        torch.testing.assert_close(grad, want[name], atol=1e-6, rtol=0)
