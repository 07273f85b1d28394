"""AdamW against its formula, the decay rule, the schedule against hand-computed numbers, the loss scaler."""

import math

import pytest
import torch
from torch import nn

from titan_moe.config.job import LRScheduler, Optimizer
from titan_moe.errors import ConfigError, TrainingError
from titan_moe.optim import LossScaler, LRSchedule, build_optimizer, decays, set_lr


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 2, 3, 4))
        self.b1 = nn.Parameter(torch.randn(2, 2, 3))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(2, 3))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)
        self.experts = Experts()
        self.web1 = nn.Parameter(torch.randn(2, 2))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)


def test_matrices_decay_and_norms_biases_and_stacked_expert_biases_do_not():
    decayed = {name for name, parameter in Model().named_parameters() if decays(name, parameter)}
    assert decayed == {"proj.weight", "experts.w1", "web1", "frozen"}


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_adamw_follows_its_formula_in_float64(implementation):
    torch.manual_seed(0)
    model = Model().double()
    config = Optimizer(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, implementation=implementation)
    optimizer = build_optimizer(model, config)
    want = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in want.items()}
    second = {name: torch.zeros_like(value) for name, value in want.items()}
    for step in range(1, 4):
        lr = 0.05 / step
        set_lr(optimizer, lr)
        for name, parameter in model.named_parameters():
            if name == "frozen":
                continue
            parameter.grad = torch.randn_like(parameter)
            first[name] = 0.8 * first[name] + 0.2 * parameter.grad
            second[name] = 0.9 * second[name] + 0.1 * parameter.grad**2
            decay = 0.3 if name in ("proj.weight", "experts.w1", "web1") else 0.0
            update = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            want[name] = want[name] * (1 - lr * decay) - lr * update
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), want[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "field, value, rule",
    [("beta1", 1.0, "less than 1"), ("beta2", -0.1, "at least 0"), ("lr", float("inf"), "finite"), ("eps", -1.0, "0")],
)
def test_impossible_hyper_parameters_are_refused_by_name(field, value, rule):
    with pytest.raises(ConfigError, match=rf"optimizer\.{field} = .*{rule}"):
        build_optimizer(Model(), Optimizer(**{field: value}))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), Optimizer())


def rates(total, peak=1.0, **config):
    schedule = LRSchedule(LRScheduler(**config), peak, total)
    return [schedule.lr_at(step) for step in range(1, total + 1)]


def test_linear_schedule_by_hand():
    assert rates(6, 2.0, warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_cosine_and_sqrt_by_hand():
    cosine = [1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 0.55, 0.1 + 0.9 * 0.5 * (1 - math.cos(math.pi / 4))]
    assert rates(4, warmup_steps=0, decay_type="cosine", min_lr_factor=0.1) == pytest.approx(cosine)
    assert rates(4, warmup_steps=0, decay_type="sqrt") == pytest.approx([1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])


def test_wsd_is_flat_between_warm_up_and_decay():
    got = rates(10, warmup_steps=2, decay_ratio=0.4, min_lr_factor=0.2)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    assert rates(3, warmup_steps=0, decay_ratio=0.0) == [1, 1, 1]


def test_a_warm_up_longer_than_the_run_is_cut_to_it_and_decay_yields_to_warm_up():
    assert rates(4, warmup_steps=200) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates(4, warmup_steps=2, decay_ratio=1.0) == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_schedule_refuses_values_out_of_range():
    for config in ({"decay_ratio": 1.5}, {"min_lr_factor": -0.1}, {"warmup_steps": -1}, {"decay_type": "step"}):
        with pytest.raises(ConfigError, match=next(iter(config))):
            rates(4, **config)


def test_loss_scaler_halves_on_overflow_doubles_after_the_interval_and_resumes():
    scaler = LossScaler(True, initial_scale=8.0, growth_interval=2)
    parameter = nn.Parameter(torch.ones(3))
    (parameter.sum() * 5 * scaler.scale).backward()
    scaler.unscale([parameter, nn.Parameter(torch.ones(1))])
    assert parameter.grad.tolist() == [5.0] * 3
    scales = []
    for finite in (True, False, True, True, True):
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [8, 4, 4, 8, 8]
    resumed = LossScaler(True, growth_interval=2)
    resumed.load_state_dict(scaler.state_dict())
    resumed.update(True)
    assert resumed.scale == 16


def test_loss_scaler_stops_when_no_scale_helps_and_does_nothing_when_disabled():
    scaler = LossScaler(True, initial_scale=2.0)
    with pytest.raises(TrainingError, match="loss scale"):
        for _ in range(100):
            scaler.update(False)
    disabled = LossScaler(False)
    disabled.update(False)
    assert disabled.scale == 1.0
