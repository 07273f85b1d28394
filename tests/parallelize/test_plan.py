"""Plans: which pattern a module gets, and what is refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe import models
from titan_moe.errors import ConfigError
from titan_moe.parallelize import Colwise, Replicate, Rowwise, plan_for
from titan_moe.parallelize.plan import match_plan


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(4, 2, bias=False)


FULL = {"blocks.*.up": Colwise(), "blocks.*.down": Rowwise(), "blocks.*": Replicate(), "out": Replicate()}


def styles(plan, **options):
    return {name: style for name, (_, style) in match_plan(Net(), plan, **options).items()}


def test_a_star_is_part_of_one_name():
    matched = styles(FULL)
    assert matched["blocks.1.up"] == Colwise() and matched["blocks.0"] == Replicate() and len(matched) == 7
    # "blocks.*" reaches no deeper than one name.
    with pytest.raises(ConfigError, match=r"no pattern of the plan covers blocks\.0\.up .*; blocks\.0\.down"):
        styles({"blocks.*": Replicate(), "out": Replicate()})
    assert styles({"blocks.*.u*": Colwise(), **FULL}, all_patterns=False)["blocks.0.up"] == Colwise()


def test_two_stars_are_any_number_of_names_none_included():
    matched = styles({"**.out": Rowwise(), "**.up": Colwise(), "blocks.**": Replicate()})
    assert matched["out"] == Rowwise() and matched["blocks.0.up"] == Colwise()
    assert matched["blocks"] == matched["blocks.1"] == matched["blocks.1.down"] == Replicate()
    assert styles({"**": Replicate()}).keys() == {name for name, _ in Net().named_modules()}


def test_the_first_pattern_that_matches_wins():
    assert styles({"blocks.0.up": Rowwise(), **FULL})["blocks.0.up"] == Rowwise()
    assert styles({**FULL, "blocks.0.**": Rowwise()}, all_patterns=False)["blocks.0.up"] == Colwise()


def test_dots_and_brackets_are_no_wildcards():
    with pytest.raises(ConfigError, match="matches no module"):
        styles({**FULL, "blocksx0.up": Colwise()})


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"pattern 'blocks\.0\.upp' matches no module.*blocks\.0\.up"):
        styles({"blocks.0.upp": Colwise(), **FULL})
    with pytest.raises(ConfigError, match="1 other patterns match nothing either"):
        styles({"a": Colwise(), "b": Colwise(), **FULL})


def test_a_pattern_behind_one_that_takes_all_its_modules_is_refused():
    with pytest.raises(ConfigError, match=r"'blocks\.0\.up' matches no module"):
        styles({**FULL, "blocks.0.up": Rowwise()})


def test_modules_without_a_pattern_are_listed_with_their_parameters():
    with pytest.raises(ConfigError) as caught:
        styles({"blocks.*.up": Colwise()})
    text = str(caught.value)
    assert "blocks.0 (Block: scale [4])" in text and "out (Linear: weight [2, 4])" in text
    assert "blocks.1.down (Linear: weight [4, 8], bias [4])" in text and "\n" not in text


def test_a_parameter_of_the_root_itself_is_listed():
    with pytest.raises(ConfigError, match=r"the module itself \(Block: scale \[4\]\)"):
        match_plan(Block(), {"up": Colwise(), "down": Rowwise()})


def test_a_long_list_is_cut():
    with pytest.raises(ConfigError, match="and 8 more"):
        match_plan(nn.ModuleList(nn.Linear(2, 2) for _ in range(20)), {})


def test_wrappers_do_not_show_in_names():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._checkpoint_wrapped_module = module

        def forward(self, x):
            return checkpoint(self._checkpoint_wrapped_module, x)

    net = Net()
    inner = net.blocks[0].up
    net.blocks[0].up = Wrapper(inner)
    matched = match_plan(net, FULL)
    assert matched["blocks.0.up"][0] is inner and len(matched) == 7


FLAVORS = [(name, flavor) for name, family in models.FAMILIES.items() for flavor in family.flavors]


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_family_plans_cover_every_published_model(family, flavor):
    with torch.device("meta"):
        model = models.build(family, flavor, num_layers=4, mtp_depth=2)
    matched = match_plan(model, plan_for(model), all_patterns=False)
    owners = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert owners <= matched.keys()


def test_family_plans_cover_the_variants():
    variants = {
        "mtp_depth": 1,
        "mtp_own_embeddings": True,
        "latent_dim": 32,
        "shared_gate": True,
        "num_dense_layers": 4,
    }
    with torch.device("meta"):
        for override in (variants, {"tie_embeddings": True}, {"q_lora_rank": None}):
            model = models.build("deepseek_v3", "debug", **override)
            match_plan(model, plan_for(model), all_patterns=False)


def test_auto_lists_what_an_unknown_module_has_that_no_family_has():
    with pytest.raises(ConfigError, match=r"no pattern of the plan covers blocks\.0 \(Block: scale \[4\]\)"):
        match_plan(Net(), plan_for(Net()), all_patterns=False)
