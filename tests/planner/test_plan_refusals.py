"""The page's short checks and numbers against those of the trainer, on random runs."""

import random
from dataclasses import asdict

import pytest
from choices import as_request, namespace, random_choice, shape, system

from titan_moe.errors import ConfigError
from titan_moe.planner.compose import compose, even_stages, refusal
from titan_moe.planner.run import Options, plan_of


@pytest.mark.parametrize("seed", range(4))
def test_the_page_refuses_what_the_trainer_refuses_and_composes_the_same_run(seed):
    rng, legal = random.Random(seed), 0
    for _ in range(600):
        choice = random_choice(rng)
        s, y, c = shape(choice), system(choice), namespace(choice)
        config, options = as_request(choice)
        try:
            _, run = plan_of(config, choice["gpus"], options, y)
        except ConfigError as error:
            assert refusal(s, y, c), (choice, str(error))
            continue
        assert refusal(s, y, c) == "", choice
        stages = [
            stage | {"layers": tuple(stage["layers"]), "mtp": tuple(stage["mtp"])}
            for stage in even_stages(s, c.pp, c.vpp)
        ]
        assert compose(s, c, stages) == asdict(run)
        legal += 1
    assert legal > 20


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("recompute", ["moe_actt"], "Did you mean 'moe_act'"),
        ("offload", ["optimiser"], "Did you mean 'optimizer'"),
        ("imbalance", 0.5, "at least 1"),
        ("lengths", [0], "at least 1 token"),
    ],
)
def test_unknown_targets_name_the_nearest(option, value, says):
    with pytest.raises(ConfigError, match=says):
        Options(**{option: value})
