"""Parameter groups by name: which rule counts, what is refused, on every stage of a pipeline alike."""

import pytest
import torch
import torch.distributed as dist
from sharded import build
from torch import nn

from titan_moe.config.groups import group_rules
from titan_moe.config.job import Optimizer
from titan_moe.errors import ConfigError
from titan_moe.optim import build_optimizer, set_lr


def groups_of(net, *rules, **options):
    """Algorithm, learning rate and weight decay by parameter name."""
    optimizer = build_optimizer(net, Optimizer(lr=0.01, weight_decay=0.1, groups=list(rules), **options))
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {
        names[parameter]: (group["algorithm"], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_the_first_rule_that_matches_counts_and_the_rest_keeps_the_defaults():
    got = groups_of(
        build(),
        {"pattern": "experts.w1", "lr": 0.5},
        {"pattern": "experts.*", "weight_decay": 0.7},
        {"pattern": "**.weight", "lr": 0.25, "weight_decay": 0.0},
    )
    assert got == {
        "experts.w1": ("AdamW", 0.5, 0.1),
        "experts.w2": ("AdamW", 0.01, 0.7),
        "experts.b1": ("AdamW", 0.01, 0.7),
        **{f"{name}.weight": ("AdamW", 0.25, 0.0) for name in ("embed", "q", "o", "norm", "lm_head")},
        "norm.bias": ("AdamW", 0.01, 0.0),
    }


def test_the_schedule_scales_every_group_from_its_own_peak():
    net = build()
    config = Optimizer(lr=0.01, groups=[{"pattern": "experts.**", "lr": 0.04}])
    optimizer = build_optimizer(net, config)
    set_lr(optimizer, 0.005)
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert rates[net.experts.w1] == pytest.approx(0.02) and rates[net.q.weight] == 0.005


def test_muon_takes_hidden_matrices_and_rules_overrule_it():
    kinds = {name: kind for name, (kind, _, _) in groups_of(build(), name="Muon").items()}
    assert {name for name, kind in kinds.items() if kind == "Muon"} == {
        "q.weight",
        "o.weight",
        "experts.w1",
        "experts.w2",
    }
    changed = groups_of(
        build(), {"pattern": "q.*", "optimizer": "AdamW"}, {"pattern": "embed.*", "optimizer": "Muon"}, name="Muon"
    )
    assert changed["q.weight"][0] == "AdamW" and changed["embed.weight"][0] == "Muon"
    assert groups_of(build(), {"pattern": "q.*", "optimizer": "Muon"})["q.weight"][0] == "Muon"


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        ({"pattern": "exprts.w1", "lr": 1.0}, r"'exprts.w1' matches no trainable parameter. Did you mean 'experts.w1'"),
        ({"lr": 1.0}, "has no pattern"),
        ({"pattern": "q.*", "rl": 1.0}, r"groups\[0\]: unknown key 'rl'. Did you mean 'lr'"),
        ({"pattern": "q.*", "lr": "big"}, r"groups\[0\].lr = 'big'"),
        ({"pattern": "q.*", "lr": -1.0}, "0 or more"),
        ({"pattern": "q.*", "weight_decay": float("nan")}, "0 or more"),
        ({"pattern": "q.*", "optimizer": "Moon"}, "Did you mean 'Muon'"),
        ({"pattern": "q.*", "row_blocks": [0]}, "row_blocks"),
        ({"pattern": "q.*", "row_blocks": [True]}, "row_blocks"),
        ({"pattern": "q.*"}, "changes nothing"),
        ({"pattern": "norm.*", "optimizer": "Muon"}, r"norm.weight \[8\] to Muon, which takes matrices"),
        ({"pattern": "experts.b1", "optimizer": "Muon"}, "no biases"),
        ({"pattern": "q.*", "row_blocks": [6]}, "only Muon uses"),
    ],
)
def test_wrong_rules_are_refused_in_one_line(rule, match):
    with pytest.raises(ConfigError, match=match) as error:
        groups_of(build(), rule)
    assert "\n" not in str(error.value)


def test_rules_are_read_without_torch_types():
    rules = group_rules(Optimizer(groups=[{"pattern": "a.*", "lr": 1, "row_blocks": [4, 2]}]))
    assert (rules[0].pattern, rules[0].lr, rules[0].row_blocks) == ("a.*", 1, [4, 2])


class Stage(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(2, 2)})


def run_stage(pattern):
    stages = nn.ModuleList([Stage(dist.get_rank())])
    return groups_of(stages, {"pattern": pattern, "lr": 0.5})


def test_a_rule_may_concern_another_stage_of_a_pipeline(run_ranks):
    first, second = run_ranks(2, run_stage, "layers.1.weight")
    assert {lr for _, lr, _ in first.values()} == {0.01}
    assert {lr for _, lr, _ in second.values()} == {0.01, 0.5}


def run_refused():
    with pytest.raises(ConfigError, match=r"'layers\.2\.\*' matches no trainable"):
        run_stage("layers.2.*")


def test_a_rule_that_concerns_no_stage_is_refused_on_all(run_ranks):
    run_ranks(2, run_refused)


def test_names_are_free_of_wrappers():
    net = nn.Module()
    net.block = torch.compile(nn.Linear(2, 2))
    assert {lr for _, lr, _ in groups_of(net, {"pattern": "block.weight", "lr": 0.5}).values()} == {0.01, 0.5}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lm_head", "AdamW"),
        ("head", "AdamW"),
        ("model.lm_head", "AdamW"),
        ("layers.0.attention.output", "Muon"),
        ("layers.0.head", "Muon"),
    ],
)
def test_heads_of_the_model_are_told_from_layers_of_that_name(name, kind):
    net = nn.Module()
    path = net
    *parents, last = name.split(".")
    for part in parents:
        setattr(path, part, nn.Module())
        path = getattr(path, part)
    setattr(path, last, nn.Linear(3, 2, bias=False))
    assert groups_of(net, name="Muon")[f"{name}.weight"][0] == kind
