"""Two factorizations of one world: what resolves, and what every refusal says."""

import itertools
from math import prod

import pytest
import torch
from degree_names import NAMES

from titan_moe.config.degrees import (
    Degrees,
    check_experts,
    divisors,
    nearest_divisors,
    reshard_after_forward,
    resolve_degrees,
)
from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError


def parallelism(**degrees):
    return Parallelism(**{NAMES[name]: value for name, value in degrees.items()})


def resolve(world, **degrees):
    return resolve_degrees(parallelism(**degrees), world)


@pytest.mark.parametrize(
    "world, degrees, dense, expert",
    [
        (1, {}, (1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
        (8, {}, (1, 1, 8, 1, 1), (1, 1, 8, 1, 1)),
        # EP may exceed DP: it folds over tp and cp too.
        (8, {"tp": 4, "ep": 8}, (1, 1, 2, 1, 4), (1, 1, 1, 8, 1)),
        (8, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, (1, 1, 2, 2, 2), (1, 1, 2, 2, 2)),
        (8, {"dpr": 2, "ep": 2}, (1, 2, 4, 1, 1), (1, 2, 2, 2, 1)),
        # The expert mesh replicates as far as it can.
        (8, {"dpr": 4, "ep": 4}, (1, 4, 2, 1, 1), (1, 2, 1, 4, 1)),
        (12, {"dpr": 3, "ep": 2}, (1, 3, 4, 1, 1), (1, 3, 2, 2, 1)),
        (16, {"pp": 2, "dps": 4, "tp": 2, "ep": 8}, (2, 1, 4, 1, 2), (2, 1, 1, 8, 1)),
        (1024, {"tp": 2, "pp": 8, "ep": 64}, (8, 1, 64, 1, 2), (8, 1, 2, 64, 1)),
    ],
)
def test_resolved_degrees(world, degrees, dense, expert):
    got = resolve(world, **degrees)
    assert tuple(got.dense.values()) == dense and tuple(got.expert.values()) == expert
    assert list(got.dense) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert list(got.expert) == ["pp", "edp_replicate", "edp_shard", "ep", "etp"]
    assert got.world == world


def test_every_layout_of_24_processes_has_two_equal_products():
    legal = 0
    for values in itertools.product((1, 2, 3, 4), repeat=5):
        names = dict(zip(("pp", "dpr", "tp", "ep", "etp"), values, strict=True))
        stage = 24 // names["pp"]
        fits = 24 % names["pp"] == 0 and stage % (names["dpr"] * names["tp"]) == 0
        fits = fits and stage % (names["ep"] * names["etp"]) == 0
        if fits:
            got = resolve(24, **names)
            assert prod(got.dense.values()) == prod(got.expert.values()) == 24
            legal += 1
        else:
            with pytest.raises(ConfigError):
                resolve(24, **names)
    assert legal > 100


def test_coordinates_are_those_of_the_unravelled_rank():
    degrees = Degrees(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, edp_replicate=2, edp_shard=2, ep=3, etp=2)
    dense = torch.arange(48).view(*degrees.dense.values())
    expert = torch.arange(48).view(*degrees.expert.values())
    for rank in range(48):
        at_dense, at_expert = degrees.coordinates(rank)
        assert dense[tuple(at_dense.values())] == rank and expert[tuple(at_expert.values())] == rank
        assert list(at_dense) == list(degrees.dense) and list(at_expert) == list(degrees.expert)


@pytest.mark.parametrize("name", ["dpr", "dps", "cp", "tp", "pp", "ep", "etp"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_degree_below_one_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"{NAMES[name]} = {value}: must be at least 1"):
        resolve(8, **{name: value})


@pytest.mark.parametrize(
    "world, degrees, says",
    [
        (8, {"pp": 3}, ["pipeline_parallel_degree = 3", "8 processes", "1, 2, 4, 8"]),
        (6, {"pp": 4}, ["pipeline_parallel_degree = 4", "2, 3, 6"]),
        (8, {"tp": 3}, ["dp_replicate 1 x cp 1 x tp 3 = 3", "8 processes", "Legal tp here: 1, 2, 4, 8"]),
        (8, {"pp": 2, "cp": 2, "tp": 4}, ["cp 2 x tp 4 = 8", "4 processes", "Legal tp here: 1, 2;", "legal cp: 1;"]),
        (8, {"dps": 3}, ["dp_shard 3", "= 3", "8 processes", "NGPU = 3", "data_parallel_shard_degree = 8, or -1"]),
        (8, {"dps": 4, "tp": 4}, ["dp_shard 4 x cp 1 x tp 4 = 16", "NGPU = 16", "data_parallel_shard_degree = 2"]),
        (8, {"dps": 2, "tp": 3}, ["dp_shard 2 x cp 1 x tp 3 = 6", "NGPU = 6", "-1 after mending the others"]),
        (8, {"ep": 3}, ["ep 3 x etp 1 = 3", "dp_shard 8", "= 8", "with etp 1: 1, 2, 4, 8"]),
        (8, {"tp": 2, "ep": 4, "etp": 4}, ["ep 4 x etp 4 = 16", "dp_shard 4 x cp 1 x tp 2 = 8", "with etp 4: 1, 2"]),
        (8, {"etp": 3}, ["ep 1 x etp 3 = 3", "with etp 3: none"]),
    ],
)
def test_a_refusal_names_the_products_and_what_is_legal(world, degrees, says):
    with pytest.raises(ConfigError) as error:
        resolve(world, **degrees)
    for part in says:
        assert part in str(error.value), str(error.value)


def test_what_a_refusal_recommends_is_legal():
    with pytest.raises(ConfigError) as error:
        resolve(48, tp=4, ep=5, etp=2)
    legal = [int(value) for value in str(error.value).rstrip(".").rpartition(": ")[2].split(", ")]
    assert legal == [1, 2, 3, 4, 6, 8, 12, 24]
    for ep in legal:
        assert resolve(48, tp=4, ep=ep, etp=2).ep == ep


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest_divisors(5, 12) == "3, 4, 6, 12"
    assert nearest_divisors(1, 7) == "1, 7"


@pytest.mark.parametrize("experts, ep", [(8, 8), (9, 2), (7, 4), (9, 5), (1, 1), (256, 64)])
def test_experts_that_reach_every_rank_are_accepted(experts, ep):
    # torch.chunk is what DTensor and FSDP cut with.
    assert len(torch.arange(experts).chunk(ep)) == ep
    check_experts(experts, Degrees(ep=ep, dp_shard=ep))


@pytest.mark.parametrize("experts, ep, legal", [(9, 4, "1, 2"), (6, 8, "1, 2"), (5, 4, "1, 2"), (1, 2, "1")])
def test_an_ep_rank_without_experts_is_refused(experts, ep, legal):
    assert len(torch.arange(experts).chunk(ep)) < ep
    degrees = resolve(8, ep=ep)
    with pytest.raises(ConfigError, match=rf"expert_parallel_degree = {ep} with {experts} experts.*here: {legal}[.,]"):
        check_experts(experts, degrees)


def test_resharding_policy():
    def policy(choice, pp):
        return reshard_after_forward(Parallelism(fsdp_reshard_after_forward=choice, pipeline_parallel_degree=pp))

    assert policy("default", 1) and policy("always", 1) and not policy("never", 1)
    assert not policy("default", 2) and not policy("never", 2)
    with pytest.raises(ConfigError, match=r"'always' with pipeline_parallel_degree = 2.*'default' or 'never'"):
        policy("always", 2)
