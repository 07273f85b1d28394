"""What parallelize does to a module besides its gradients: names, weights, precision, evaluation, recompute."""

import copy
import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from layouts import build_tiny, gradient_errors, make_batch, reference, train_step
from pool import RankFailure
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe import models
from titan_moe.config.degrees import Degrees
from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError
from titan_moe.moe import MoE, Router
from titan_moe.parallelize import Attention, Colwise, Experts, Rowwise, VocabParallel, build_meshes, parallelize
from titan_moe.plugins.recompute import recompute_layers

TP2_EP2 = {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}


def _meshes(**degrees):
    return build_meshes(Parallelism(**degrees))


def names_and_classes():
    model = build_tiny("deepseek_v3")
    before = {name: type(module) for name, module in model.named_modules()}
    parameters = [name for name, _ in model.named_parameters()]
    assert parallelize(model, _meshes(**TP2_EP2)) is model
    assert [name for name, _ in model.named_parameters()] == parameters
    assert list(model.state_dict()) == list(build_tiny("deepseek_v3").state_dict())
    for name, module in model.named_modules():
        assert isinstance(module, before.pop(name)), name
    assert not before
    return True


def test_names_and_classes_stay(run_ranks):
    assert all(run_ranks(2, names_and_classes))


def initial_weights():
    meshes = _meshes(**TP2_EP2)
    override = {"vocab_size": 31, "num_experts": 5, "num_groups": 1, "topk_groups": 1, "hidden_dim": 11, "mtp_depth": 1}
    with torch.device("meta"):
        model = models.build("deepseek_v3", "debug", **override)
    parallelize(model, meshes)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    models.init_parameters(model, seed=4)
    want = dict(models.build("deepseek_v3", "debug", seed=4, **override).named_parameters())
    real = parallelize(models.build("deepseek_v3", "debug", seed=4, **override), meshes)
    for (name, parameter), (_, other) in zip(model.named_parameters(), real.named_parameters(), strict=True):
        assert isinstance(parameter, DTensor) and parameter.placements == other.placements, name
        assert torch.equal(parameter.to_local(), other.to_local()), name
        if not any(hasattr(placement, "split_factor") for placement in parameter.placements):
            assert torch.equal(parameter.full_tensor(), want[name]), name
    largest = max(want.items(), key=lambda item: item[1].numel())[0]
    return model.get_parameter(largest).to_local().numel() / want[largest].numel()


def test_meta_and_real_parameters_end_with_the_same_weights(run_ranks):
    assert run_ranks(4, initial_weights) == pytest.approx([0.25] * 4, rel=0.25)


def evaluation(sequence_parallel):
    batch = make_batch(2, 5)
    plain, model = build_tiny("deepseek_v3").eval(), build_tiny("deepseek_v3")
    parallelize(model, _meshes(**TP2_EP2), sequence_parallel=sequence_parallel).eval()
    with torch.no_grad():
        want = plain(batch[0], document_ids=batch[2])
        got = model(batch[0], document_ids=batch[2])
        loss = models.token_losses(got, batch[1]).main_sum - models.token_losses(want, batch[1]).main_sum
    return (got.full_tensor() - want).abs().max().item(), loss.abs().item()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_evaluation(run_ranks, sequence_parallel):
    for logits_error, loss_error in run_ranks(2, evaluation, sequence_parallel):
        assert logits_error < 1e-12 and loss_error < 1e-11


def tied_head(sequence_parallel):
    batch = make_batch(2, 6)
    losses, gradients, _ = reference("qwen3_moe", batch, 1, tie_embeddings=True)
    model = build_tiny("qwen3_moe", tie_embeddings=True)
    parallelize(model, _meshes(tensor_parallel_degree=2), sequence_parallel=sequence_parallel)
    assert "lm_head.weight" not in dict(model.named_parameters())
    loss = train_step(model, batch, slice(None))
    return (loss - losses[0]).abs().item(), max(gradient_errors(model, gradients).values())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_tied_head_shares_the_embedding_s_rows(run_ranks, sequence_parallel):
    for loss_error, gradient_error in run_ranks(2, tied_head, sequence_parallel):
        assert loss_error < 1e-11 and gradient_error < 1e-10


def recomputed():
    batch = make_batch(2, 7)
    models_ = [build_tiny("deepseek_v3") for _ in range(2)]
    recompute_layers(models_[1])
    for model in models_:
        parallelize(model, _meshes(**TP2_EP2))
    losses = [train_step(model, batch, slice(None)) for model in models_]
    for (name, a), (_, b) in zip(models_[0].named_parameters(), models_[1].named_parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local()), name
    counts = [torch.stack([m.balance.counts_E for m in model.modules() if isinstance(m, MoE)]) for model in models_]
    return torch.equal(*losses) and torch.equal(*counts)


def test_recompute_changes_no_bit(run_ranks):
    assert run_ranks(2, recomputed) == [True, True]


def accumulated():
    batch = make_batch(4, 6)
    _, gradients, _ = reference("qwen3_moe", batch, 2)
    model = parallelize(build_tiny("qwen3_moe"), _meshes(**TP2_EP2))
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        train_step(model, batch, slice(part, None, 2))
    return max(gradient_errors(model, gradients).values())


def test_gradients_of_two_micro_batches_add_up(run_ranks):
    assert max(run_ranks(2, accumulated)) < 1e-10


def half_precision():
    model = models.build("gpt_oss", "debug", num_layers=2, num_kv_heads=2, vocab_size=30).bfloat16()
    parallelize(model, _meshes(**TP2_EP2))
    loss = train_step(model, make_batch(2, 6), slice(None))
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert routers and all(isinstance(r, FSDPModule) and r.weight.grad.dtype == torch.float32 for r in routers)
    assert loss.dtype == torch.float32
    return all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())


def test_bf16_keeps_the_router_in_fp32(run_ranks):
    assert run_ranks(2, half_precision) == [True, True]


def mixed_precision():
    """fp32 parameters, bf16 compute: near the fp32 gradients of one process."""
    batch = make_batch(2, 6)
    plain, model = (build_tiny("qwen3_moe", router_dtype="float32").float() for _ in range(2))
    parallelize(model, _meshes(**TP2_EP2), compute_dtype=torch.bfloat16)
    train_step(plain, batch, slice(None))
    train_step(model, batch, slice(None))
    errors = []
    for (_, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        errors.append(((a.grad.full_tensor() - b.grad).norm() / b.grad.norm()).item())
    return sorted(errors)[len(errors) // 2]


def test_mixed_precision_is_near_full_precision(run_ranks):
    # bf16 sends some tokens to other experts. A reduction too few or too many would be at least 0.5.
    assert max(run_ranks(2, mixed_precision)) < 0.25


def one_process():
    model, plain = build_tiny("deepseek_v3"), build_tiny("deepseek_v3")
    parallelize(model, _meshes())
    batch = make_batch(2, 6)
    losses = [train_step(m, batch, slice(None)) for m in (model, plain)]
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    untouched = not any("forward" in vars(m) or isinstance(m, FSDPModule) for m in model.modules())
    return same and untouched and torch.equal(*losses)


def test_one_process_keeps_the_bare_module(run_ranks):
    assert run_ranks(1, one_process) == [True]


class PlainNet(nn.Module):
    """No base class, no config, one linear used by nobody in this project."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


PLAN = {"tokens": VocabParallel(), "up": Colwise(), "down": Rowwise(), "head": VocabParallel()}


def plain_net(sequence_parallel):
    torch.manual_seed(1)
    ids = torch.arange(10).view(2, 5)
    plain = PlainNet().double()
    model = copy.deepcopy(plain)
    parallelize(model, _meshes(tensor_parallel_degree=2), PLAN, sequence_parallel=sequence_parallel)
    want, got = models.token_losses(plain(ids), ids).total, models.token_losses(model(ids), ids).total
    want.backward()
    got.backward()
    return max(
        (a.grad.full_tensor() - b.grad).abs().max().item()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_plain_module_with_a_plan_of_its_own(run_ranks, sequence_parallel):
    assert max(run_ranks(2, plain_net, sequence_parallel)) < 1e-12


def refused(plan):
    net = PlainNet()
    before = list(net.parameters())
    try:
        parallelize(net, _meshes(tensor_parallel_degree=2), plan)
    finally:
        assert all(a is b for a, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "plan, text",
    [
        ("auto", r"no pattern of the plan covers tokens \(Embedding: weight \[10, 8\]\)"),
        ({**PLAN, "nothing": Colwise()}, "pattern 'nothing' matches no module"),
        ({**PLAN, "up": Experts()}, "Experts on up: they belong to a PlainNet"),
        ({**PLAN, "tokens": Colwise()}, "Colwise on tokens, a Embedding: it is for nn.Linear"),
        ({**PLAN, "head": Attention(heads=("n",))}, "on head: n is None, not a number of heads"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(run_ranks, plan, text):
    with pytest.raises(RankFailure, match=text):
        run_ranks(2, refused, plan)


def no_experts():
    parallelize(PlainNet(), _meshes(expert_parallel_degree=2), PLAN)


def test_expert_parallelism_of_a_module_without_experts_is_refused(run_ranks):
    with pytest.raises(RankFailure, match=r"expert_parallel_degree = 2 .* finds no experts in this PlainNet"):
        run_ranks(2, no_experts)


def too_many_ranks():
    parallelize(build_tiny("qwen3_moe", num_kv_heads=1), _meshes(tensor_parallel_degree=2))


def test_kv_heads_that_tp_does_not_divide_are_refused(run_ranks):
    with pytest.raises(RankFailure, match="num_kv_heads = 1"):
        run_ranks(2, too_many_ranks)


def copied():
    model = parallelize(build_tiny("qwen3_moe"), _meshes(tensor_parallel_degree=2), fsdp=False)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.norm.weight.mul_(2)
        batch = make_batch(1, 4)
        # A copy that still ran the original's methods would give the original's logits.
        return (other(batch[0])[0].full_tensor() - 2 * model(batch[0])[0].full_tensor()).abs().max().item()


def test_a_deep_copy_runs_on_its_own_weights(run_ranks):
    assert max(run_ranks(2, copied)) < 1e-12


def freed():
    model = parallelize(build_tiny("deepseek_v3"), _meshes(**TP2_EP2))
    train_step(model, make_batch(2, 6), slice(None))
    alive = weakref.ref(model)
    del model
    gc.collect()
    return alive() is None


def test_nothing_keeps_a_model_alive(run_ranks):
    assert run_ranks(2, freed) == [True, True]


def memory():
    model = parallelize(build_tiny("qwen3_moe"), _meshes(**TP2_EP2), fsdp=False)
    locals_ = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in locals_) and len(locals_) > 20


def test_a_rank_s_part_does_not_hold_the_memory_of_the_whole(run_ranks):
    assert run_ranks(2, memory) == [True, True]


class Collectives(TorchDispatchMode):
    """Counts functional collectives by kind."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d_functional" in str(func):
            self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def collectives():
    model = parallelize(build_tiny("qwen3_moe", num_layers=1), _meshes(tensor_parallel_degree=2), fsdp=False)
    with Collectives() as mode:
        train_step(model, make_batch(1, 6), slice(None))
    return mode.counts["all_gather_into_tensor"], mode.counts["reduce_scatter_tensor"], mode.counts["all_reduce"]


def test_linears_with_one_input_share_a_gather(run_ranks):
    # Forward: gathers of attention's and head's input, scatters of embedding and attention; backward the reverse.
    assert run_ranks(2, collectives) == [(4, 4, 0)] * 2


class CountedHeads(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.n_heads, self.n_kv_heads = heads, 2


def test_attention_counts_its_own_heads():
    block, context = CountedHeads(), SimpleNamespace(tp_size=2, meshes=SimpleNamespace(degrees=Degrees(tp=2)))
    Attention(heads=("n_heads", "n_kv_heads")).apply("block", block, context)
    assert (block.n_heads, block.n_kv_heads) == (2, 1)


@pytest.mark.parametrize(
    "block, heads, text",
    [
        (
            CountedHeads(3),
            ("n_kv_heads", "n_heads"),
            "n_heads is 3, not a number .* = 2 divides",
        ),
        (CountedHeads(), ("num_heads",), "num_heads is None"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(block, heads, text):
    with pytest.raises(ConfigError, match=text):
        Attention(heads=heads).check("block", block, SimpleNamespace(tp_size=2))
