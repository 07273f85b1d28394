"""The router's kernels in Triton's interpreter, against loops over tokens and experts in float64."""

import math

import oracle_routing as oracle
import pytest
import torch
from interpreter import backend, by_triton

from titan_moe.kernels.router_topk import RouterSpec, expressible, router_topk
from titan_moe.moe.balance import Balance
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router

VARIANTS = {
    "softmax_post": {},
    "softmax_pre": {"normalize_weights": False},
    "softmax_bias": {"expert_bias": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid_plain_k1": {"score_function": "sigmoid", "normalize_weights": False, "top_k": 1},
    "sigmoid_normal_k1": {"score_function": "sigmoid", "top_k": 1},
    "sqrtsoftplus_scaled": {"score_function": "sqrtsoftplus", "route_scale": 2.5},
    "deepseek_v3": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "topk_groups": 2,
        "route_scale": 2.5,
    },
    "groups_by_max": {"num_groups": 3, "topk_groups": 2, "group_score_k": 1, "normalize_weights": False},
    "groups_masked_with_zero": {
        "num_groups": 4,
        "topk_groups": 2,
        "group_mask": "zero",
        "normalize_weights": False,
        "group_score_k": 1,
    },
    "many": {"num_experts": 60, "top_k": 22},
}


def config_of(**fields):
    return MoEConfig(dim=4, hidden_dim=4, **{"num_experts": 12, "top_k": 3, **fields})


def run(config, logits, bias, valid, sequences, losses, grads=None):
    """Results, and the logits' gradient of their product with ``grads``."""
    spec = Router(config).spec
    logits = logits.clone().requires_grad_()
    ids, weights, counts, sums = router_topk(logits, bias, valid, spec, sequences, losses)
    out = {"ids": ids, "weights": weights.detach(), "counts": counts}
    if losses:
        out |= {"probs": sums.probs_BE.detach(), "plain": sums.counts_BE, "squares": sums.squares.detach()}
    if grads is not None:
        total = (weights * grads["weights"]).sum()
        if losses:
            total = total + (sums.probs_BE * grads["probs"]).sum() + sums.squares * grads["squares"]
        (out["dlogits"],) = torch.autograd.grad(total, logits)
    return out


def by_oracle(config, logits, bias, valid, sequences, grads):
    logits = logits.double().clone().requires_grad_()
    T, E = logits.shape
    flags = [True] * T if valid is None else valid.tolist()
    routed = oracle.route(logits, config, bias, flags)
    ids = torch.tensor([list(row) or [-1] * config.top_k for row in routed])
    zero = torch.zeros((), dtype=torch.float64)
    weights = torch.stack([torch.stack(list(row.values()) or [zero] * config.top_k) for row in routed])
    S = T // sequences
    probs, plain = [], []
    for b in range(sequences):
        part = slice(b * S, (b + 1) * S)
        mean, chosen = torch.zeros(E, dtype=torch.float64), [0] * E
        for row, real in zip(logits[part], flags[part], strict=True):
            if real:
                s = oracle.scores(row, config.score_function)
                mean = mean + torch.stack([v / sum(s) for v in s])
                for e in oracle.best([v.item() for v in s], config.top_k):
                    chosen[e] += 1
        probs.append(mean)
        plain.append(chosen)
    probs = torch.stack(probs)
    squares = sum(logits[t].logsumexp(0) ** 2 for t in range(T) if flags[t])
    total = (weights * grads["weights"]).sum() + (probs * grads["probs"]).sum() + squares * grads["squares"]
    (dlogits,) = torch.autograd.grad(total, logits)
    counts = torch.bincount(ids[ids >= 0], minlength=E)
    return {
        "ids": ids,
        "weights": weights.detach(),
        "counts": counts,
        "probs": probs.detach(),
        "plain": torch.tensor(plain),
        "squares": squares.detach(),
        "dlogits": dlogits,
    }


def inputs(config, T, sequences, dtype, padded):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(T, config.num_experts, generator=g, dtype=torch.float64).mul_(2).to(dtype)
    bias = torch.randn(config.num_experts, generator=g).mul_(0.3) if config.expert_bias else None
    valid = torch.rand(T, generator=g) < 0.7 if padded else None
    shapes = {"weights": (T, config.top_k), "probs": (sequences, config.num_experts), "squares": ()}
    grads = {k: torch.randn(s, generator=g, dtype=torch.float64).mul_(0.1) for k, s in shapes.items()}
    return logits, bias, valid, grads


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", VARIANTS)
def test_router_equals_the_loop(name, padded):
    config = config_of(**VARIANTS[name])
    logits, bias, valid, grads = inputs(config, 2 * 11, 2, torch.float32, padded)
    narrow = {k: v.float() for k, v in grads.items()}
    got = by_triton(run, config, logits, bias, valid, 2, True, narrow)
    want = by_oracle(config, logits, bias, valid, 2, {k: v.double() for k, v in narrow.items()})
    assert torch.equal(got.pop("ids").long(), want.pop("ids"))
    assert torch.equal(got.pop("counts").sum(0), want.pop("counts"))
    assert torch.equal(got.pop("plain"), want.pop("plain"))
    for key in want:
        # Sums of at most 11 rows of logsumexp squared up to 40; all else is of magnitude 1.
        atol = 1e-4 if key == "squares" else 1e-5
        torch.testing.assert_close(
            got[key].double(), want[key], atol=atol, rtol=0, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("name", ["softmax_post", "deepseek_v3", "sqrtsoftplus_scaled"])
def test_router_in_float64(name):
    config = config_of(**VARIANTS[name])
    logits, bias, valid, grads = inputs(config, 10, 1, torch.float64, True)
    with backend("triton"):
        got = run(config, logits, bias, valid, 1, True, grads)
    want = by_oracle(config, logits, bias, valid, 1, grads)
    for key in ("weights", "probs", "squares", "dlogits"):
        torch.testing.assert_close(got[key], want[key], atol=1e-12, rtol=0)


def test_without_losses_only_the_weights_have_a_gradient():
    config = config_of(**VARIANTS["deepseek_v3"])
    logits, bias, _, grads = inputs(config, 9, 1, torch.float32, False)
    narrow = {k: v.float() for k, v in grads.items()}
    got = by_triton(run, config, logits, bias, None, 1, False, narrow)
    narrow["probs"], narrow["squares"] = torch.zeros(1, 12), torch.zeros(())
    with backend("triton"):
        want = run(config, logits, bias, None, 1, True, narrow)
    for key in ("ids", "weights", "counts", "dlogits"):
        assert torch.equal(got[key], want[key]), key


def awkward_logits(E):
    """Rows of constants, NaN, infinities, in every mixture that a diverging run shows."""
    nan, inf = math.nan, math.inf
    rows = [[1.0] * E, [-30.0] * E, [nan] * E, [inf] * E, [-inf] * E]
    base = [0.1 * ((7 * e) % E) - 0.4 for e in range(E)]
    for value in (nan, inf, -inf):
        rows += [[value if e in at else v for e, v in enumerate(base)] for at in ((0,), (3, 5), (0, 1, 2, E - 1))]
    rows += [[nan, inf, -inf, *base[3:]], [200.0, -200.0, *base[2:]], [-inf] * (E - 1) + [2.0]]
    return torch.tensor(rows)


@pytest.mark.parametrize("name", ["softmax_post", "softmax_pre", "softmax_bias", "sigmoid", "deepseek_v3",
                                  "groups_by_max", "groups_masked_with_zero", "sqrtsoftplus_scaled"])  # fmt: skip
def test_fault_35_awkward_rows_choose_as_the_torch_router_does(name):
    config = config_of(**VARIANTS[name])
    logits = awkward_logits(12)
    router, balance = Router(config), Balance(config)
    if config.expert_bias:
        router.expert_bias.copy_(torch.linspace(-0.5, 0.5, 12).flip(0))
    router.logits = lambda x: x
    want, _ = router(logits, balance)
    got = by_triton(run, config, logits, router.expert_bias, None, 1, False)
    ids = got["ids"].long()
    assert torch.equal(ids, want.expert_ids_TK)
    assert all(len(set(row)) == config.top_k for row in ids.tolist()) and ((ids >= 0) & (ids < 12)).all()
    torch.testing.assert_close(got["weights"], want.weights_TK.detach(), atol=1e-6, rtol=1e-5, equal_nan=True)
    assert ids[0].tolist() == list(range(3)) or config.num_groups > 1 or config.expert_bias


def test_fault_35_negative_biased_scores_never_select_a_masked_group():
    config = config_of(**VARIANTS["deepseek_v3"])
    logits = torch.full((4, 12), -4.0)
    logits[:, 6:] = -3.0  # groups 2 and 3 win
    got = by_triton(run, config, logits, torch.full((12,), -2.0), None, 1, False)
    assert (got["ids"] >= 6).all()


def test_choice_follows_from_the_same_logits_in_every_block():
    """A sequence longer than a block: the counts of blocks add up, and equal rows choose equally."""
    config = config_of(num_experts=8)
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).expand(150, 8).contiguous()
    got = by_triton(run, config, logits, None, None, 1, True)
    assert got["counts"].shape == (3, 8) and got["counts"].sum() == 450
    assert (got["ids"] == got["ids"][0]).all() and (got["counts"].sum(1) == torch.tensor([192, 192, 66])).all()


@pytest.mark.parametrize("selection", ["sinkhorn", "expert_choice", "round_robin"])
def test_selections_that_no_kernel_expresses_run_in_torch(selection):
    config = config_of(selection=selection)
    router, balance, x = Router(config), Balance(config), torch.randn(9, 4)
    want, _ = router(x, balance)
    with backend("triton"):
        got, _ = router(x, balance)
    assert torch.equal(got.expert_ids_TK, want.expert_ids_TK) and torch.equal(got.weights_TK, want.weights_TK)


def test_too_many_experts_run_in_torch():
    few, many = (RouterSpec(2, "softmax", True, 1.0, g, 1, 1, "-inf") for g in (1, 3))
    assert expressible(1024, few) and not expressible(1025, few)
    assert expressible(768, many) and not expressible(1023, many)  # groups of 341 are padded to 512


def test_fault_38_no_tokens_in_the_router():
    config = config_of(**VARIANTS["deepseek_v3"], seq_aux_loss_coef=0.1, z_loss_coef=0.1)
    router = Router(config)
    with backend("triton"):
        routing, aux = router(torch.empty(0, 4), Balance(config), None, 2)
    assert routing.expert_ids_TK.shape == (0, 3) and routing.counts_E.tolist() == [0] * 12 and aux == 0
