"""The whole layer on Triton: equal to the loop in float64, few launches, nothing read back."""

from types import SimpleNamespace

import pytest
import torch
from interpreter import backend, by_triton
from test_layer import CASES, PADDING, assert_close, build, data, gradients, oracle_gradients
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.kernels.grouped_mlp import _GroupedMLP
from titan_moe.kernels.launch import observed
from titan_moe.kernels.router_topk import _RouterTopk
from titan_moe.moe import MoE, MoEConfig


# The quick suite's share; the slow one runs tests/moe on both backends.
@pytest.mark.parametrize("valid", [None, PADDING], ids=["full", "padded"])
@pytest.mark.parametrize("name", ["sigmoid_bias_groups", "gpt_oss", "llama4"])
def test_layer_on_triton_equals_the_loop(name, valid):
    layer = build(**CASES[name])
    x, dy = data()
    with backend("triton"):
        got = gradients(layer, x, dy, valid)
    assert_close(got, oracle_gradients(layer, x, dy, valid), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax_post", "all_losses"])
def test_fault_37_layer_is_bitwise_equal_in_any_order_of_programs(name):
    layer = build(torch.float32, **CASES[name])
    x, dy = data(dtype=torch.float32)
    by_triton(gradients, layer, x, dy)


def test_a_gradient_of_another_backend_than_the_forward():
    """The backend may be switched between the two passes: what is saved means the same to both."""
    layer = build(**CASES["gpt_oss"])
    x, dy = data()
    want = gradients(layer, x, dy)
    for first, second in (("triton", "torch"), ("torch", "triton")):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with backend(first):
            y = layer(leaf)
        with backend(second):
            y.backward(dy)
        got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        assert_close(got, want, atol=1e-10)


def test_a_layer_on_meta_has_shapes():
    with torch.device("meta"):
        layer, x = MoE(MoEConfig(dim=6, hidden_dim=5, num_experts=8, top_k=2)), torch.empty(2, 9, 6)
    x.requires_grad_()
    with backend("triton"):
        layer(x).sum().backward()
    assert x.grad.shape == x.shape and layer.experts.w1.grad.shape == layer.experts.w1.shape


class Launches(TorchDispatchMode):
    """What runs on the device: kernels by name, and torch's own operators that compute."""

    FREE = (
        "view",
        "t",
        "transpose",
        "unsqueeze",
        "expand",
        "empty",
        "new_empty",
        "detach",
        "slice",
        "alias",
        "as_strided",
        "promote_types",
    )

    def __init__(self):
        super().__init__()
        self.kernels, self.operators = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("aten::") and name.removeprefix("aten::").lstrip("_").split(".")[0] not in self.FREE:
            self.operators.append(name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))

    def record(self, kernel, programs, args, meta):
        self.kernels.append(kernel.__name__.strip("_").removesuffix("_kernel"))


def launches(layer, x, backward):
    dy = torch.ones_like(x)
    with Launches() as seen, observed(seen.record), backend("triton"):
        y = layer(x)
        if backward:
            seen.kernels, seen.operators = [], []
            y.backward(dy)
    return seen.kernels, seen.operators


@pytest.mark.parametrize("name", ["softmax_post", "sigmoid_bias_groups"])
def test_launches(name):
    fields = {k: v for k, v in CASES[name].items() if "loss" not in k and "shared" not in k}
    layer = build(torch.float32, **fields).eval()
    x = data(dtype=torch.float32)[0].requires_grad_()
    kernels, operators = launches(layer, x, backward=False)
    assert kernels == ["router", "route_map", "gather_up", "rows", "combine"]
    # With the gate's product: 6.
    assert operators == ["mm"], operators
    kernels, operators = launches(layer, x, backward=True)
    assert kernels == ["down_dgrad", "wgrad", "wgrad", "rows", "combine", "router_backward"]
    # With the gate's two products: 8. The last is the engine's own sum of the two gradients of x.
    assert sorted(operators) == ["add", "mm", "mm"], operators


class NoCopies(TorchDispatchMode):
    """No tensor may leave its device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        moved = function._schema.name in ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::item")
        devices = {t.device.type for t in [*args, out] if isinstance(t, torch.Tensor)}
        assert not (moved and len(devices) > 1), function
        return out


def ctx_of(function, args, needed):
    """A forward's context: a CPU build of torch cannot run its autograd engine on fake CUDA tensors."""
    ctx = SimpleNamespace(needs_input_grad=needed, mark_non_differentiable=lambda *_: None)
    ctx.set_materialize_grads = lambda _: None
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    return ctx, function.forward(ctx, *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax_post", "sigmoid_bias_groups", "gpt_oss", "llama4", "all_losses", "latent"])
def test_no_host_sync_on_fake_cuda_tensors(name, dtype):
    """A fake tensor has no values: reading one back raises, in the launchers too."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            layer = MoE(MoEConfig(**{"dim": 64, "hidden_dim": 48, "num_experts": 8, "top_k": 2, **CASES[name]}))
    finally:
        torch.set_default_dtype(torch.float32)
    with FakeTensorMode(), torch.no_grad(), NoCopies(), backend("auto"):
        for module in layer.modules():
            for held in (module._parameters, module._buffers):
                for key, t in held.items():
                    if t is not None:
                        held[key] = torch.empty(t.shape, dtype=t.dtype, device="cuda")
        for flag in (True, False):
            seen = []
            with observed(lambda kernel, *_, seen=seen: seen.append(kernel.__name__)):
                y = layer.train(flag)(torch.empty(2, 9, layer.config.dim, dtype=dtype, device="cuda"))
            assert y.device.type == "cuda" and len(seen) == 5

        # The backward passes of both operators, by hand.
        logits = torch.empty(18, 8, device="cuda")
        bias = layer.router.expert_bias
        ctx, out = ctx_of(_RouterTopk, (logits, bias, None, 2, True, layer.router.spec), (True,))
        _, weights, _, probs, _, squares = out
        dlogits = _RouterTopk.backward(ctx, None, weights, None, probs, None, squares)[0]
        assert dlogits.shape == logits.shape
        routing = layer.route(torch.empty(18, layer.config.dim, dtype=dtype, device="cuda"), None, 2)[0]
        dim = layer.config.expert_dim
        x = torch.empty(18, dim, dtype=dtype, device="cuda")
        e, dispatched = layer.experts, layer.dispatcher.dispatch(x, routing)
        m = dispatched.route_map
        args = (
            x,
            e.w1,
            e.w2,
            e.b1,
            e.b2,
            dispatched.weights,
            m.offsets_E,
            m.row_of_TK,
            m.slot_of_R,
            m.tiles,
            m.slots_per_token,
        )
        ctx, y = ctx_of(_GroupedMLP, (*args, e.activation, e.weight_on == "input", e.save), (True,) * 6)
        grads = _GroupedMLP.backward(ctx, y)
        assert [g.shape for g in grads[:3]] == [x.shape, e.w1.shape, e.w2.shape]


def test_the_detectors_work():
    with FakeTensorMode(), NoCopies():
        x = torch.empty(3, device="cuda")
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(AssertionError):
            x.cpu()
