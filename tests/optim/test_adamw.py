"""AdamW on state in every storage: against its formula, against each other, sharded, and resumed."""

import copy

import pytest
import torch
from sharded import LAYOUTS, build, differing, give_grads, run_steps, whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.checkpoint import Checkpointer
from titan_moe.config.job import Optimizer
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.fsdp_ep import apply_fsdp
from titan_moe.optim import build_optimizer

LEAN = {
    "bf16": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "chance": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16", "stochastic_rounding": True},
    "fp8": {"exp_avg_dtype": "float8", "exp_avg_sq_dtype": "float8", "stochastic_rounding": True},
    "fp16": {"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"},
}
# Every shard of every layout has whole blocks of 32.
WIDE = {"dim": 64, "hidden": 64, "heads": 128}
LOW = {
    "remainders": {"store_param_remainders": True},
    "master": {"master_dtype": "float32"},
    "fp16_master": {"master_dtype": "float16"},
    "no_master": {"stochastic_rounding": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
}


def started(options, layout=None, dtype=torch.float32, **sizes):
    net = build(layout, dtype=dtype, **sizes)
    return net, build_optimizer(net, Optimizer(**{"lr": 0.01} | options))


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_bf16_moments_follow_the_formula_with_moments_rounded_after_each_step(implementation):
    options = LEAN["bf16"] | {"implementation": implementation, "beta1": 0.8, "beta2": 0.9}
    net, optimizer = started(options)
    want = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in want.items()}
    second = {name: torch.zeros_like(value) for name, value in want.items()}
    for step in range(1, 4):
        give_grads(net, step)
        for name, parameter in net.named_parameters():
            grad = parameter.grad.double()
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.9 * second[name] + 0.1 * grad**2
            decay = 0.0 if name.startswith("norm") or name == "experts.b1" else 0.1
            update = first[name] / (1 - 0.8**step) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-8)
            want[name] = want[name] * (1 - 0.01 * decay) - 0.01 * update
            first[name] = first[name].float().bfloat16().double()
            second[name] = second[name].float().bfloat16().double()
        optimizer.step()
    for name, parameter in net.named_parameters():
        # fp32 arithmetic on values of order 1.
        torch.testing.assert_close(parameter.detach().double(), want[name], rtol=0, atol=2e-6, msg=name)
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 0.02), ("chance", 0.04), ("fp16", 0.002), ("fp8", 0.3)])
def test_lean_moments_stay_near_those_of_float64(kind, bound):
    exact, exact_optimizer = started({}, dtype=torch.float64)
    lean, lean_optimizer = started(LEAN[kind])
    run_steps(exact, exact_optimizer, range(20))
    run_steps(lean, lean_optimizer, range(20))
    moved = sum((p.detach() - q).norm() ** 2 for p, q in zip(exact.parameters(), build().parameters(), strict=True))
    apart = sum((p.double() - q).norm() ** 2 for p, q in zip(lean.parameters(), exact.parameters(), strict=True))
    # Shares of the way: some four times what the formats' own precisions, 2**-8, 2**-8, 2**-11 and 2**-4, give.
    assert 0 < (apart / moved) ** 0.5 < bound


def bytes_of_state(optimizer, parameter):
    return sum(value.nbytes for key, value in optimizer.state[parameter].items() if key != "step")


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, torch.float32, 8),
        (LEAN["bf16"], torch.float32, 4),
        (LEAN["fp16"], torch.float32, 4 + 4 / 32),
        (LEAN["fp8"], torch.float32, 2 + 4 / 32),
        ({"store_param_remainders": True} | LEAN["bf16"], torch.bfloat16, 6),
        ({"master_dtype": "float32"} | LEAN["bf16"], torch.bfloat16, 8),
        ({}, torch.bfloat16, 8),
    ],
)
def test_bytes_of_state_per_parameter(options, dtype, expected):
    net, optimizer = started(options, dtype=dtype, dim=64, hidden=32)
    run_steps(net, optimizer, [1])
    for parameter in (net.q.weight, net.experts.w1):
        assert bytes_of_state(optimizer, parameter) == expected * parameter.numel()


def test_remainders_are_bit_equal_to_masters_and_to_fp32_parameters_with_rounded_gradients():
    nets = {
        "remainders": started({"store_param_remainders": True}, dtype=torch.bfloat16),
        "master": started({"master_dtype": "float32"}, dtype=torch.bfloat16),
        "fp32": started({}),
    }
    full = nets["fp32"][0]
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.copy_(parameter.bfloat16())
    for step in range(60):
        for net, optimizer in nets.values():
            give_grads(net, step)
            for parameter in net.parameters():
                parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)
            optimizer.step()
    for name, parameter in full.named_parameters():
        split, master = (nets[kind][0].get_parameter(name) for kind in ("remainders", "master"))
        assert split.dtype == torch.bfloat16 and torch.equal(split, master), name
        bits = parameter.detach().view(torch.int32)
        assert torch.equal(nets["master"][1].state[master]["master"].view(torch.int32), bits), name
        remainder = nets["remainders"][1].state[split]["remainder"]
        assert remainder.dtype == torch.int16 and torch.equal(remainder, bits.to(torch.int16)), name


def test_without_masters_chance_moves_what_nearest_leaves_in_place():
    def final(options):
        net = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(net.weight)
        optimizer = build_optimizer(net, Optimizer(lr=1e-4, weight_decay=0.0, **options))
        for _ in range(100):
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
        return net.weight.detach().double().mean().item()

    assert final({}) == 1.0
    # 100 steps of 1e-4, each rounded to a unit of 2**-8 below 1; 64 * 64 elements leave a deviation of 4e-4 * 0.5.
    assert final({"stochastic_rounding": True}) == pytest.approx(0.99, abs=1e-3)


def test_main_gradients_add_up_in_their_own_dtype():
    net = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    build_optimizer(net, Optimizer(main_grad_dtype="float32"))
    for part in (1.0, 2.0**-10, 2.0**-10):
        (net(torch.ones(1, 1, dtype=torch.bfloat16)) * part).sum().backward()
    assert net.weight.grad.dtype == torch.float32 and net.weight.grad.item() == 1 + 2.0**-9
    half = nn.Linear(2, 2)
    build_optimizer(half, Optimizer(main_grad_dtype="bfloat16"))
    half(torch.ones(1, 2)).sum().backward()
    assert half.weight.grad.dtype == torch.bfloat16


def run_main_grads():
    net = nn.Sequential(nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    nn.init.ones_(net[0].weight)
    apply_fsdp(net, init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    build_optimizer(net, Optimizer(main_grad_dtype="float32"))
    for part in (1.0, 2.0**-10):
        (net(torch.ones(1, 4, dtype=torch.bfloat16)) * part).sum().backward()
    grad = net[0].weight.grad.to_local()
    return grad.dtype, grad.unique().tolist()


def test_main_gradients_of_shards_add_up_in_their_own_dtype(run_ranks):
    assert run_ranks(2, run_main_grads) == [(torch.float32, [2 + 2.0**-9])] * 2


def test_options_that_concern_no_parameter_are_refused():
    for options in ({"master_dtype": "float32"}, {"store_param_remainders": True}):
        with pytest.raises(ConfigError, match="no trainable parameter is in bfloat16"):
            started(options)


def test_a_large_parameter_in_pieces_is_the_same_parameter(monkeypatch):
    whole, optimizer = started(LEAN["fp8"])
    run_steps(whole, optimizer, range(3))
    monkeypatch.setattr("titan_moe.optim.slot.PIECE", 50)
    monkeypatch.setattr("titan_moe.optim.adamw.PIECE", 50)
    pieces, other = started(LEAN["fp8"])
    run_steps(pieces, other, range(3))
    assert not differing(pieces, other, whole_state(whole, optimizer))


def run_layout(layout, options, dtype):
    # The fused update of a CPU rounds the last elements of a tensor, where vectors end, in another way.
    options = options | {"implementation": "foreach"}
    single = started(options, dtype=dtype, **WIDE)
    placed = started(options, layout, dtype=dtype, **WIDE)
    for pair in (single, placed):
        run_steps(*pair, range(3))
    return differing(*placed, whole_state(*single))


CASES = {
    **{name: (LEAN[name], torch.float32) for name in ("chance", "fp8")},
    "low": (LOW["remainders"], torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_one_process(run_ranks, layout):
    for case, (options, dtype) in CASES.items():
        ranks = 3 if layout == "fsdp3" else 4
        assert run_ranks(ranks, run_layout, layout, options, dtype) == [[]] * ranks, case


class Dispatched(TorchDispatchMode):
    """Names of the operators that DTensor is asked for: it derives their placements, slowly the first time."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def run_watched():
    names = {}
    for case, (options, dtype) in CASES.items():
        net, optimizer = started(options, "fsdp2_tp2_ep4", dtype=dtype, **WIDE)
        give_grads(net, 0)
        with Dispatched() as seen:
            optimizer.step()
        names[case] = seen.names
    return names


def test_the_first_step_works_on_parts_alone(run_ranks):
    assert run_ranks(4, run_watched) == [{case: {"aten.detach.default"} for case in CASES}] * 4


def run_uneven():
    with pytest.raises(ConfigError, match=r"cut into pieces of 3 along its last dim.*32"):
        net, optimizer = started(LEAN["fp8"], "tp4_ep2_etp2")
        run_steps(net, optimizer, [1])


def test_shards_that_would_cut_a_block_are_refused(run_ranks):
    run_ranks(4, run_uneven)


ALL = {name: (options, torch.float32) for name, options in LEAN.items()}
ALL |= {name: (options, torch.bfloat16) for name, options in LOW.items()}


@pytest.mark.parametrize("kind", ALL)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(kind, tmp_path):
    options, dtype = ALL[kind]
    straight = started(options, dtype=dtype)
    run_steps(*straight, range(5))
    net, optimizer = started(options, dtype=dtype)
    run_steps(net, optimizer, range(3))
    Checkpointer(tmp_path).save(3, net, optimizer)
    resumed = started(options, dtype=dtype)
    Checkpointer(tmp_path).load(*resumed)
    run_steps(*resumed, range(3, 5))
    assert not differing(*resumed, whole_state(*straight))


@pytest.mark.parametrize("kind", ALL)
def test_torchs_own_state_dict_keeps_every_bit(kind):
    options, dtype = ALL[kind]
    net, optimizer = started(options, dtype=dtype)
    run_steps(net, optimizer, range(3))
    other, resumed = started(options | {"lr": 0.5}, dtype=dtype)
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((net, optimizer), (other, resumed)):
        run_steps(*pair, range(3, 5))
    assert not differing(other, resumed, whole_state(net, optimizer))
    with pytest.raises(CheckpointError, match=r"configure the optimizer as it was"):
        started({"exp_avg_dtype": "float16"}, dtype=dtype)[1].load_state_dict(started_state())


def started_state():
    net, optimizer = started({})
    run_steps(net, optimizer, [0])
    return optimizer.state_dict()


def test_state_in_another_dtype_is_refused_and_not_cast(tmp_path):
    net, optimizer = started(LEAN["bf16"])
    run_steps(net, optimizer, [0])
    Checkpointer(tmp_path).save(1, net, optimizer)
    with pytest.raises(CheckpointError, match=r"of another dtype: optim\..*exp_avg torch.bfloat16 in the checkpoint"):
        Checkpointer(tmp_path).load(*started({}))
    with pytest.raises(CheckpointError, match=r"missing: optim\..*exp_avg_scale"):
        Checkpointer(tmp_path).load(*started(LEAN["fp16"]))


def run_reshard(folder, layout, save):
    options = LEAN["fp8"] | {"implementation": "foreach"}
    net, optimizer = started(options, layout, **WIDE)
    if save:
        run_steps(net, optimizer, range(2))
        Checkpointer(folder).save(2, net, optimizer)
        return None
    Checkpointer(folder).load(net, optimizer)
    run_steps(net, optimizer, range(2, 4))
    single = started(options, **WIDE)
    run_steps(*single, range(4))
    return differing(net, optimizer, whole_state(*single))


def test_lean_state_moves_to_another_layout_bit_by_bit(run_ranks, tmp_path):
    run_ranks(4, run_reshard, str(tmp_path), "hsdp2x2", True)
    assert run_ranks(4, run_reshard, str(tmp_path), "fsdp4_edp2_etp2", False) == [[]] * 4
