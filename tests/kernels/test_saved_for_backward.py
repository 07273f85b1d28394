"""``moe.save``: how many bytes of a layer wait for its backward pass, and what gradients come of them."""

import pytest
import torch
from expert_case import ExpertCase
from interpreter import backend, by_triton
from oracle_layer import oracle_activation
from test_layer import CASES, PADDING, build, data, gradients, oracle_gradients
from test_layer import assert_close as assert_layer_close

from titan_moe.errors import ConfigError
from titan_moe.kernels.grouped_mlp import grouped_mlp
from titan_moe.kernels.launch import observed
from titan_moe.kernels.quant_rows import dequant_rows, quant_rows
from titan_moe.moe import MoE, MoEConfig

SAVES = ["preact", "input", "preact_fp8"]


def saved_bytes(layer, x):
    """Bytes that autograd keeps of one forward pass, each storage once, parameters excluded."""
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(storages.values())


@pytest.mark.parametrize("save, most", [("preact", 19_500), ("input", 3_500), ("preact_fp8", 7_500)])
@pytest.mark.parametrize(
    "router", [{}, {"score_function": "sigmoid", "expert_bias": True, "aux_loss_coef": 0.01, "route_scale": 2.5}]
)
def test_saved_bytes_of_the_whole_layer(save, most, router):
    """fp32. Per token: 4D of the input and 4K nF of the pre-activation, and the routing besides, which depends on E."""
    T, D, F, E, K = 2048, 512, 256, 64, 8
    layer = MoE(MoEConfig(D, F, E, K, save=save, **router))
    per_token = saved_bytes(layer, torch.randn(T, D, requires_grad=True)) / T
    z = {"preact": 4 * 2 * F, "input": 0, "preact_fp8": 2 * F + 4 * 2 * F / 128}[save]
    least = 4 * D + K * z
    # Logits and scores of all experts; per slot int64 ids and rows both ways, weights and scores; a few words.
    routing = 2 * 4 * E + K * (8 + 8 + 8 + 4 + 4) + 12
    spare_row = (z + 8 + 8 * E) / T
    assert least <= per_token <= least + routing + spare_row
    assert per_token <= most


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("case", ["sigmoid_bias_groups", "gpt_oss", "input_weight_top2_bias", "counts_padded"])
def test_layer_that_keeps_its_input_alone_equals_the_loop(case, name):
    layer = build(save="input", **CASES[case])
    x, dy = data()
    with backend(name):
        got = gradients(layer, x, dy, PADDING)
    assert_layer_close(got, oracle_gradients(layer, x, dy, PADDING), atol=1e-10)


# Magnitudes of all finite float8 e4m3 numbers: seven below the first normal one, then eight steps per power of two.
E4M3 = torch.tensor(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
)


def in_fp8(z):
    """One row ``[N]`` as it comes back from FP8, by the definition of the format."""
    parts = []
    for group in z.float().split(128):
        scale = group.abs().max() / 448
        nearest = ((group / scale).abs()[:, None] - E4M3).abs().argmin(1)
        parts.append(E4M3[nearest].copysign(group) * scale)
    return torch.cat(parts).double()


def fp8_oracle(case):
    """Output of the exact function, and gradients of the one whose pre-activation came back from FP8."""
    leaves = {name: t.clone().requires_grad_() for name, t in {"x": case.x, "weights": case.weights, **case.p}.items()}
    exact, through = torch.zeros(case.T, case.D).double(), torch.zeros(case.T, case.D).double()
    for e, t, k in case.rows:
        w = leaves["weights"][t, k]
        u = leaves["w1"][e] @ leaves["x"][t]
        b1, b2 = (leaves[b][e] if b in leaves else 0 for b in ("b1", "b2"))
        kept = u if case.on_input else u + b1
        back = kept + (in_fp8(kept.detach().flatten()).view_as(kept) - kept.detach())
        for out, value in ((exact, kept), (through, back)):
            z = value * w + b1 if case.on_input else value
            y = leaves["w2"][e] @ oracle_activation(z, case.act) + b2
            out[t] = out[t] + (y if case.on_input else w * y)
    grads = torch.autograd.grad((through * case.do).sum(), list(leaves.values()))
    return {"y": exact.detach(), **dict(zip(leaves, grads, strict=True))}


def operator_gradients(case, save):
    leaves = {name: t.clone().requires_grad_() for name, t in {"x": case.x, "weights": case.weights, **case.p}.items()}
    m = case.map()
    y = grouped_mlp(
        *(leaves["x"], leaves["w1"], leaves["w2"], leaves.get("b1"), leaves.get("b2"), leaves["weights"]),
        *(m.offsets_E, case.act, case.weight_on, m, save),
    )
    grads = torch.autograd.grad(y, list(leaves.values()), case.do)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(
    "variant", [("swiglu", True, "activation"), ("relu2", False, "activation"), ("geglu", True, "input")], ids=str
)
def test_fp8_gradients_are_those_of_the_pre_activation_that_comes_back(variant, name):
    kind, bias, on = variant
    wide = {"dtype": torch.float64, "weight_dtype": torch.float64}
    # 2F = 160: one whole group of 128 and a part of one.
    case = ExpertCase(kind=kind, bias=bias, weight_on=on, T=9, F=80, **wide)
    with backend(name):
        got = operator_gradients(case, "preact_fp8")
        exact = operator_gradients(case, "preact")
    want = fp8_oracle(case)
    for key in want:
        torch.testing.assert_close(got[key], want[key], atol=1e-10, rtol=0, msg=lambda m, key=key: f"{key}: {m}")
    assert torch.equal(got["y"], exact["y"])
    # Not exact, then, but each value of z is within 2^-4 of itself, most far nearer.
    for key in ("x", "w1", "w2", "weights"):
        error = (got[key] - exact[key]).norm() / exact[key].norm()
        assert 1e-4 < error < 2**-4, (key, error)


def rows_of_all_magnitudes(R, N, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(R, N, generator=g) * torch.exp(6 * torch.randn(R, 1, generator=g))
    x[R // 2, : N // 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_error_is_within_the_stated_bound(dtype):
    x = rows_of_all_magnitudes(64, 300, dtype)
    back = dequant_rows(*quant_rows(x), torch.float32).double()
    most = torch.cat([g.abs().amax(1, keepdim=True).expand_as(g) for g in x.double().split(128, 1)], 1)
    bound = (x.double().abs() * 2**-4).maximum(most / 448 * 2**-10) * (1 + 2**-20)
    assert ((back - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R, N", [(33, 300), (1, 5), (64, 128)])
def test_fp8_kernels_equal_torch_bit_for_bit(R, N, dtype):
    x = rows_of_all_magnitudes(R, N, dtype)
    codes, scales = by_triton(quant_rows, x)
    want = quant_rows(x)
    assert torch.equal(codes, want[0]) and torch.equal(scales, want[1])
    every = torch.arange(256, dtype=torch.uint8)[None]
    for q, s in ((codes, scales), (every, torch.tensor([[0.5, 3.0]]))):
        got, plain = by_triton(dequant_rows, q, s, dtype), dequant_rows(q, s, dtype)
        torch.testing.assert_close(got, plain, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("save", SAVES)
def test_fault_38_no_tokens_whatever_is_saved(save):
    layer = build(save=save)
    x = torch.randn(0, 6, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 6) and (layer.experts.w1.grad == 0).all()


def test_launches_of_each_way():
    """One more than the plain five of the backward pass for the first linear, one more each way for FP8."""
    counts = {}
    for save in SAVES:
        layer = build(torch.float32, save=save).eval()
        x = data(dtype=torch.float32)[0].requires_grad_()
        seen = []
        with backend("triton"), observed(lambda kernel, *_, seen=seen: seen.append(kernel.__name__)):
            y = layer(x)
            forward = len(seen)
            y.backward(torch.ones_like(y))
        counts[save] = forward, len(seen) - forward
    assert counts == {"preact": (5, 6), "input": (5, 7), "preact_fp8": (6, 7)}


def test_the_loop_over_experts_cannot_choose():
    with pytest.raises(ConfigError, match=r"save = 'input' with experts = 'sequential'.*Set experts = 'grouped'"):
        MoEConfig(6, 5, 8, 2, save="input", experts="sequential")
