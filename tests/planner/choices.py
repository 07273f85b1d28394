"""Random runs for the tests: what a user could choose, legal or not."""

import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from titan_moe.config import JobConfig
from titan_moe.models import config as model_config
from titan_moe.models.count import Shape, shape_of
from titan_moe.parallelize.stages import SCHEDULES
from titan_moe.planner.run import OFFLOAD, PUBLISHED_MTP, RECOMPUTE, Options, family_of, flavors
from titan_moe.planner.systems import System, systems


def some(rng: random.Random, values: tuple[str, ...]) -> list[str]:
    return rng.sample(values, rng.choice([0, 0, 1, 2]))


def random_choice(rng: random.Random) -> dict[str, Any]:
    """One value per option, as the page's controls have them."""
    pp = rng.choice([1, 1, 2, 4, 8, 3])
    vpp = rng.choice([1, 1, 2, 4]) if pp > 1 else rng.choice([1, 1, 1, 2])
    schedule = rng.choice(SCHEDULES) if rng.random() < 0.5 else "Interleaved1F1B" if vpp > 1 else "1F1B"
    gpus = rng.choice([8, 16, 48, 64, 256, 1024])
    return {
        "model": rng.choice(sorted(flavors())),
        "system": rng.choice(["a100", "h100", "h200", "b200", "gb200", "gb300"]),
        "mtp": rng.random() < 0.5,
        "gpus": gpus,
        "tp": rng.choice([1, 1, 2, 4, 3]),
        "cp": rng.choice([1, 1, 1, 2, 4]),
        "pp": pp,
        "vpp": vpp,
        "ep": rng.choice([1, 2, 8, 16, 32, 64, 6]),
        "etp": rng.choice([1, 1, 1, 2]),
        "mbs": rng.choice([1, 1, 2, 3]),
        "gbs": rng.choice([256, 512, 1024, 3072, 8192]),
        "seq": rng.choice([2048, 4096, 16384, 131072, 4100]),
        "schedule": schedule,
        "precision": rng.choice(["bf16", "fp8_block", "mxfp8", "nvfp4"]),
        "recompute": some(rng, RECOMPUTE),
        "offload": some(rng, OFFLOAD),
        "dispatcher": rng.choice(["alltoall", "deepep", "hybridep", "allgather"]),
        "ep_overlap": rng.random() < 0.5,
        "cuda_graph": rng.random() < 0.5,
        "memory_efficient_permutation": rng.random() < 0.5,
        "moments": rng.choice(["fp32", "bf16"]),
        "imbalance": rng.choice([1.0, 1.25]),
        "moe_save": rng.choice(["preact", "input", "preact_fp8"]),
        "recv_capacity_factor": rng.choice([0, 0, 0, 1.0, 1.1, 1.5, 40.0]),
        "causal": rng.random() < 0.8,
        "lengths": rng.choice([[], [], [1000, 3000, 96]]),
        "rank_rule": rng.choice(["worst", "worst", "report"]),
    }


def overrides(choice: dict[str, Any]) -> dict[str, Any]:
    published = PUBLISHED_MTP.get(choice["model"], {}) if choice["mtp"] else {}
    return {"max_seq_len": 1 << 20} | published


def shape(choice: dict[str, Any]) -> Shape:
    return shape_of(model_config(*family_of(choice["model"]), **overrides(choice)))


def system(choice: dict[str, Any]) -> System:
    return next(iter(systems()[choice["system"]].values()))


def as_request(choice: dict[str, Any]) -> tuple[JobConfig, Options]:
    """The same run for ``plan_of``."""
    config = JobConfig()
    config.model.name, config.model.flavor = family_of(choice["model"])
    config.model.override = overrides(choice)
    p = config.parallelism
    p.tensor_parallel_degree, p.context_parallel_degree = choice["tp"], choice["cp"]
    p.pipeline_parallel_degree, p.virtual_pipeline_degree = choice["pp"], choice["vpp"]
    p.expert_parallel_degree, p.expert_tensor_parallel_degree = choice["ep"], choice["etp"]
    p.pipeline_parallel_schedule = choice["schedule"]
    p.pipeline_parallel_microbatch_size = choice["mbs"] if choice["pp"] > 1 else 1
    config.moe.save, config.moe.recv_capacity_factor = choice["moe_save"], choice["recv_capacity_factor"] or None
    config.training.seq_len = choice["seq"]
    config.training.global_batch_size = choice["gbs"]
    config.training.local_batch_size = -1 if choice["pp"] > 1 else choice["mbs"]
    return config, Options(**{name: choice[name] for name in asdict(Options()) if name in choice})


def namespace(choice: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**choice)
