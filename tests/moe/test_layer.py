"""The whole layer against a loop over tokens and experts in float64: output and every gradient."""

import pytest
import torch
from oracle_layer import oracle_layer
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.moe import MoE, MoEConfig

SIZES = {"dim": 6, "hidden_dim": 5, "num_experts": 8, "top_k": 2}

# Each choice of each kind at least once with each backend; pairs that interact together.
CASES = {
    "softmax_post": {},
    "softmax_pre": {"normalize_weights": False, "aux_loss_coef": 0.3},
    "softmax_pre_top1_relu2": {"normalize_weights": False, "top_k": 1, "activation": "relu2"},
    "sigmoid_bias_groups": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "topk_groups": 2,
        "route_scale": 2.5,
        "seq_aux_loss_coef": 0.2,
        "shared_hidden_dim": 7,
    },
    "groups_by_max": {"num_groups": 4, "topk_groups": 2, "group_score_k": 1, "normalize_weights": False},
    "groups_masked_with_zero": {
        "num_groups": 4,
        "topk_groups": 2,
        "group_score_k": 1,
        "group_mask": "zero",
        "normalize_weights": False,
    },
    "sigmoid_plain": {"score_function": "sigmoid", "normalize_weights": False, "z_loss_coef": 0.1},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus", "global_aux_loss_coef": 0.4, "activation": "geglu"},
    "gpt_oss": {
        "router_bias": True,
        "activation": "clamped_swiglu",
        "activation_limit": 0.4,
        "expert_linear_bias": True,
        "aux_loss_coef": 0.1,
    },
    "llama4": {
        "top_k": 1,
        "score_function": "sigmoid",
        "normalize_weights": False,
        "weight_on": "input",
        "shared_hidden_dim": 4,
    },
    "input_weight_top2_bias": {"weight_on": "input", "expert_linear_bias": True, "activation": "geglu"},
    "expert_choice": {"selection": "expert_choice", "z_loss_coef": 0.1},
    "sinkhorn": {"selection": "sinkhorn", "activation": "geglu"},
    "round_robin": {"selection": "round_robin", "activation": "relu2", "expert_linear_bias": True},
    "all_losses": {
        "aux_loss_coef": 0.1,
        "seq_aux_loss_coef": 0.2,
        "global_aux_loss_coef": 0.3,
        "z_loss_coef": 0.4,
        "top_k": 3,
    },
    "capacity_probs": {"capacity_factor": 0.7, "aux_loss_coef": 0.3},
    "capacity_position_bias": {"capacity_factor": 0.7, "drop_policy": "position", "expert_linear_bias": True},
    "capacity_padded": {"capacity_factor": 1.2, "pad_to_capacity": True, "expert_linear_bias": True},
    "capacity_padded_position": {"capacity_factor": 0.5, "pad_to_capacity": True, "drop_policy": "position"},
    "counts_padded": {"pad_counts_to": 4, "expert_linear_bias": True, "score_function": "sigmoid"},
    "expert_choice_counts_padded": {"selection": "expert_choice", "pad_counts_to": 8},
    "shared_gate": {"shared_hidden_dim": 7, "shared_gate": True, "activation": "geglu"},
    "shared_relu2": {"shared_hidden_dim": 3, "activation": "relu2", "capacity_factor": 0.8},
    "shared_clamped": {"shared_hidden_dim": 3, "activation": "clamped_swiglu", "activation_limit": 0.4},
    "latent": {"latent_dim": 4, "shared_hidden_dim": 5, "shared_gate": True, "expert_linear_bias": True},
    "latent_capacity": {"latent_dim": 3, "capacity_factor": 0.6, "z_loss_coef": 0.1},
}


def build(dtype=torch.float64, seed=0, **overrides):
    """A layer with every parameter random, biases and the selection bias too."""
    torch.manual_seed(seed)
    layer = MoE(MoEConfig(**{**SIZES, **overrides})).to(dtype)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.6)
    if layer.router.expert_bias is not None:
        torch.nn.init.normal_(layer.router.expert_bias, std=0.3)
    return layer


def gradients(layer, x, dy, valid=None):
    """Output and all gradients, by name."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, valid)
    y.backward(dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def oracle_gradients(layer, x, dy, valid=None):
    """The same by ``oracle_layer``, in float64."""
    p = {name: t.detach().double().requires_grad_() for name, t in layer.named_parameters()}
    x = x.detach().double().requires_grad_()
    y, aux = oracle_layer(x, p, layer.config, layer.experts.activation, layer.router.expert_bias, valid)
    grads = torch.autograd.grad((y * dy.double()).sum() + aux, [x, *p.values()], allow_unused=True)
    # An expert, or a router behind forced ids, that nothing reaches has gradient 0.
    grads = [torch.zeros_like(t) if g is None else g for t, g in zip([x, *p.values()], grads, strict=True)]
    return dict(zip(["y", "x", *p], [y.detach(), *grads], strict=True))


def assert_close(actual, expected, atol, rtol=0.0):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] is not None, name
        torch.testing.assert_close(
            actual[name].double(), value.double(), atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )


def data(B=2, S=9, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(B, S, SIZES["dim"], dtype=dtype), torch.randn(B, S, SIZES["dim"], dtype=dtype)


PADDING = torch.ones(2, 9, dtype=torch.bool)
PADDING[0, 7:] = False
PADDING[1, 3:] = False


@pytest.mark.parametrize("backend", ["grouped", "sequential"])
@pytest.mark.parametrize("valid", [None, PADDING], ids=["full", "padded"])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.usefixtures("kernels")
def test_layer_equals_the_loop_in_output_and_every_gradient(name, valid, backend):
    layer = build(experts=backend, **CASES[name])
    x, dy = data()
    assert_close(gradients(layer, x, dy, valid), oracle_gradients(layer, x, dy, valid), atol=1e-10)


@pytest.mark.parametrize(
    "name", ["softmax_post", "sigmoid_bias_groups", "gpt_oss", "llama4", "latent", "counts_padded"]
)
@pytest.mark.usefixtures("kernels")
def test_float32_layer_equals_the_float64_loop_to_rounding(name):
    layer = build(torch.float32, **CASES[name])
    x, dy = data(dtype=torch.float32)
    # Sums over at most 18 tokens of chains of four products of magnitude up to about 10.
    assert_close(gradients(layer, x, dy), oracle_gradients(layer, x, dy), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["grouped", "sequential"])
def test_autocast_computes_experts_in_bfloat16(backend):
    layer = build(torch.float32, experts=backend, expert_linear_bias=True)
    x, dy = data(dtype=torch.float32)
    expected = gradients(layer, x, dy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(layer, x, dy.bfloat16())
    assert got["y"].dtype == torch.bfloat16 and got["experts.w1"].dtype == torch.float32
    for name in ("y", "x", "experts.w1", "experts.w2", "experts.b1", "experts.b2"):
        # At most four chained roundings of 2^-8 of the tensor's scale.
        assert (got[name].float() - expected[name]).norm() < 4 * 2**-8 * expected[name].norm(), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_that_is_not_bool_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"valid is {dtype}: must be torch.bool.*Pass valid.bool\(\)"):
        MoE(MoEConfig(**SIZES))(torch.randn(2, 3, 6), torch.ones(2, 3, dtype=dtype))


def test_two_dim_input_is_one_sequence():
    layer = build(seq_aux_loss_coef=0.3)
    x, dy = data(1, 18)
    flat = gradients(layer, x[0], dy[0])
    whole = gradients(layer, x, dy)
    assert flat["y"].shape == (18, 6)
    assert all(torch.equal(flat[k].view_as(whole[k]), whole[k]) for k in whole)


@pytest.mark.usefixtures("kernels")
def test_non_contiguous_input_and_gradient():
    layer = build()
    x, dy = data()
    expected = gradients(layer, x, dy)
    strided = [t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in (x, dy)]
    assert not strided[0].is_contiguous()
    assert_close(gradients(layer, *strided), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax_post", "sigmoid_bias_groups", "gpt_oss", "capacity_padded", "latent"])
def test_grouped_layer_never_asks_the_host(name, dtype):
    """Fake tensors have no values: reading one, or a shape that depends on one, raises."""
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            layer = MoE(MoEConfig(**{**SIZES, **CASES[name]}))
        finally:
            torch.set_default_dtype(torch.float32)
        x = torch.randn(2, 9, 6, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.dtype == dtype and x.grad.shape == x.shape
        assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("name", ["softmax_post", "gpt_oss", "capacity_padded"])
@pytest.mark.usefixtures("kernels")
def test_compiled_layer_equals_eager(name):
    layer = build(torch.float32, **CASES[name])
    x, dy = data(dtype=torch.float32)
    expected = gradients(layer, x, dy)
    torch.compiler.reset()
    layer.compile(backend="aot_eager")
    # The same operators in the same order, except for fused adds.
    assert_close(gradients(layer, x, dy), expected, atol=1e-5, rtol=1e-5)


def test_compiled_experts_are_one_graph():
    layer = build(torch.float32)
    x, dy = data(dtype=torch.float32)
    x, dy = x.view(-1, 6), dy.view(-1, 6)
    routing, _ = layer.router(x, layer.balance)
    routing.weights_TK = routing.weights_TK.detach()

    def run(x):
        dispatched = layer.dispatcher.dispatch(x, routing)
        y = layer.experts(dispatched.x, dispatched.counts_E, dispatched.weights, dispatched.route_map)
        return layer.dispatcher.combine(y, dispatched)

    results = []
    torch.compiler.reset()
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(dy)
        results.append([y.detach(), leaf.grad, layer.experts.w1.grad, layer.experts.w2.grad])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name, save",
    [
        *((name, "preact") for name in ("softmax_post", "sigmoid_bias_groups", "gpt_oss", "llama4", "all_losses")),
        *(pytest.param(name, "preact", marks=pytest.mark.slow) for name in ("latent", "capacity_probs")),
        ("softmax_post", "input"),
        pytest.param("gpt_oss", "preact_fp8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_layer_compiles_to_one_graph_in_training(name, save):
    """No graph break: counters and losses included."""
    x, dy = data(dtype=torch.float32)
    found = []
    for compiled in (False, True):
        layer = build(torch.float32, save=save, **CASES[name]).train()
        layer.balance.token_weight = torch.tensor(0.3)
        if compiled:
            torch.compiler.reset()
            layer.compile(fullgraph=True, backend="aot_eager")
        counters = dict(layer.balance.named_buffers())
        found.append({**gradients(layer, x, dy), **counters})
    # The same operators in the same order, except for fused adds.
    assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    assert found[1]["counts_E"].sum() == x[..., 0].numel() * layer.config.top_k
