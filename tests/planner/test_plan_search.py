"""The search: legal, fitting, at least as fast as the report's own layouts, and ready for the trainer."""

import json
import tomllib

import pytest
from published import FIT_ROWS, prepared

from titan_moe.errors import ConfigError
from titan_moe.planner.command import Flags, main
from titan_moe.planner.partition import balanced_stages
from titan_moe.planner.predict import predict
from titan_moe.planner.run import shape_of
from titan_moe.planner.search import search


def found(given: set[str] = frozenset(), **values) -> list:
    from titan_moe.models import config as model_config
    from titan_moe.planner.command import config_of
    from titan_moe.planner.systems import system_of

    flags = Flags(**values)
    config = config_of(flags)
    shape = shape_of(model_config(config.model.name, config.model.flavor, **config.model.override))
    return search(flags, system_of(flags.system), set(given), shape)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "gpus", "row"), [("h100", 1024, FIT_ROWS[2]), ("gb200", 256, FIT_ROWS[1])])
def test_it_proposes_what_fits_and_is_as_fast_as_the_reports_own(system, gpus, row):
    best = found(model="deepseek_v3_671b", system=system, gpus=gpus)
    own = predict(*prepared(row[2], row[1]))
    assert best[0].result["fits"]
    assert best[0].speed >= own["tokens_per_s_per_gpu"]
    speeds = [item.speed for item in best]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 5


def test_no_other_candidate_of_a_small_space_is_faster():
    """The bounds lose nothing: every candidate predicted, one after the other."""
    from itertools import product

    fixed = {"model": "qwen3_moe_30b_a3b", "system": "h100", "gpus": 16, "gbs": 64, "precision": "bf16"}
    fixed |= {"moments": "fp32", "dispatcher": "deepep", "cuda_graph": False}
    given = {*fixed, "recompute", "offload", "ep_overlap", "vpp"}
    best = found(given, **fixed)[0]
    fastest = 0.0
    for tp, pp, ep, mbs in product((1, 2, 4), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4)):
        values = fixed | {"tp": tp, "pp": pp, "ep": ep, "mbs": mbs, "memory_efficient_permutation": True}
        try:
            result = predict(*prepared(values))
        except ConfigError:
            continue
        if result["fits"]:
            fastest = max(fastest, result["tokens_per_s_per_gpu"])
    assert best.speed >= fastest * (1 - 1e-12)


def test_what_is_given_stays():
    for item in found({"tp", "precision", "pp"}, model="qwen3_moe_30b_a3b", gpus=32, tp=2, pp=2, precision="bf16"):
        assert (item.run.tp, item.run.pp, item.run.precision) == (2, 2, "bf16")


def test_balanced_stages_by_hand():
    shape = prepared({"model": "deepseek_v3_671b", "gpus": 8})[0]
    # Dense layers at half the cost, a head as dear as two layers: the report's layout for 32 stages.
    stages = balanced_stages(shape, 32, [0.5, 1.0, 0.2, 2.0])
    letters = ["t" * len(s["layers"]) + "m" * len(s["mtp"]) + "L" * s["head"] for s in stages]
    assert letters[0].startswith("ttt") and letters[-1] == "L" and all(letters)
    assert sum(map(len, letters)) == 63 and max(map(len, letters[1:])) == 2


@pytest.mark.slow
def test_the_toml_is_one_that_the_trainer_accepts(tmp_path, capsys):
    file = tmp_path / "best.toml"
    words = ["--search", "--model", "qwen3_moe_30b_a3b", "--system", "h100", "--gpus", "16", "--toml", str(file)]
    main([*words, "--json"], 1)
    answer = json.loads(capsys.readouterr().out)
    config = tomllib.loads(file.read_text())
    layout = answer["layout"]
    assert config["parallelism"]["expert_parallel_degree"] == layout["ep"]
    assert config["parallelism"]["pipeline_parallel_degree"] == layout["pp"]
    assert answer["fits"] and len(answer["alternatives"]) == 4
    main(["--config", str(file), "--gpus", "16", "--json"], 1)


def test_the_terminal_explains_the_best(capsys):
    main(["--search", "--model", "qwen3_moe_30b_a3b", "--system", "h200", "--gpus", "8"], 1)
    text = " ".join(capsys.readouterr().out.split())
    assert "1. " in text and "bound by" in text and "the first beats the second by" in text


def test_nothing_that_fits_says_how_much_is_missing():
    with pytest.raises(ConfigError, match=r"none of|comes near to fitting"):
        found(model="deepseek_v3_671b", system="h100", gpus=8)
