"""Random layouts of random models: what the configuration allows must train as one process does."""

from random import Random
from typing import Any

from layout_table import make
from model_case import TINY, Case

from titan_moe.config.degrees import Degrees, reshard_after_forward, resolve_degrees
from titan_moe.config.job import JobConfig, Training
from titan_moe.errors import ConfigError
from titan_moe.parallelize.check import check_layout
from titan_moe.parallelize.stages import ONE_STAGE, SCHEDULES, V_SHAPED

_LATENT = ("deepseek_v3", "kimi_k2")
_DENSE_FIRST = (*_LATENT, "glm4_moe")


def draw(seed: int, number: int) -> Case:
    """Draw ``number`` of ``seed``, whatever was drawn before it. What is refused is drawn again.

    Raises:
        anything but a ConfigError that the checks raise: a refusal that a user could not read.
    """
    random = Random(f"{seed}/{number}")
    while True:
        layout = _layout(random)
        try:
            degrees = resolve_degrees(make(**layout).parallelism(), layout["ranks"])
        except ConfigError:
            continue
        # Most models do not fit a given layout, so a layout gets some tries.
        for _ in range(100):
            case = _case(random, layout, degrees)
            try:
                check_case(case)
            except ConfigError:
                continue
            return case


def check_case(case: Case) -> None:
    """All that is asked of a configuration before a process group exists.

    Raises:
        ConfigError: the case cannot run.
    """
    degrees = resolve_degrees(case.parallelism(), case.ranks)
    job = JobConfig(parallelism=case.parallelism(), training=Training(seq_len=case.seq_len))
    job.moe.dispatcher = case.override.get("dispatcher")
    reshard_after_forward(job.parallelism)
    check_layout(job, case.config(), degrees, case.local_rows(degrees.dp_replicate * degrees.dp_shard))


def _layout(random: Random) -> dict[str, Any]:
    one_of = random.choice
    return {
        "ranks": one_of([2, 4, 8, 8, 8, 8]),
        "dpr": one_of([1, 1, 2, 4]),
        "dps": one_of([-1, -1, -1, 1, 2]),
        "cp": one_of([1, 1, 2, 2, 4]),
        "tp": one_of([1, 1, 2, 2, 3, 4]),
        "pp": one_of([1, 1, 2, 4]),
        "ep": one_of([1, 2, 2, 4, 4, 8]),
        "etp": one_of([1, 1, 2, 4]),
    }


def _case(random: Random, layout: dict[str, Any], degrees: Degrees) -> Case:
    one_of, family = random.choice, random.choice(list(TINY))
    keys: dict[str, Any] = {
        "family": family,
        "sp": random.random() < 0.7,
        "method": one_of(["allgather", "alltoall"]),
        "reshard": one_of(["default", "default", "never", "always"]),
        "seq_len": one_of([1, 2, 5, 8, 11, 12, 12, 16, 16]),
        "passes": one_of([1, 1, 2, 3]),
        "recompute": random.random() < 0.2,
        "padding": random.random() < 0.2,
        **_model(random, family),
    }
    local = random.randint(1, 3)
    if degrees.pp > 1:
        keys["schedule"] = one_of(SCHEDULES)
        keys["vpp"] = 1 if keys["schedule"] in ONE_STAGE else 2 if keys["schedule"] in V_SHAPED else one_of([1, 2, 3])
        keys["micro"] = one_of([1, 1, 2])
        local = keys["micro"] * random.randint(1, 2 * degrees.pp + 1)
    return make(**layout, **keys, rows=local * keys["passes"] * degrees.dp_replicate * degrees.dp_shard)


def _model(random: Random, family: str) -> dict[str, Any]:
    one_of = random.choice
    experts = one_of([*range(3, 13), 8, 16])
    sizes: dict[str, Any] = {
        "dim": one_of([8, 12, 16]),
        "num_layers": random.randint(1, 6),
        "num_heads": one_of([4, 8]),
        "vocab_size": random.randint(17, 48),
        "hidden_dim": random.randint(4, 12),
        "num_experts": experts,
        "top_k": random.randint(1, 3),
        "mtp_depth": one_of([0, 0, 1, 2]),
        "mtp_own_embeddings": random.random() < 0.2,
        "tie_embeddings": random.random() < 0.3,
        "z_loss_coef": one_of([0.0, 0.01]),
        "seq_aux_loss_coef": one_of([0.0, 0.05]),
        one_of(["aux_loss_coef", "global_aux_loss_coef"]): one_of([0.0, 0.05]),
        "experts": one_of(["grouped", "grouped", "sequential"]),
        "dispatcher": one_of(["local", "alltoall", "allgather", "alltoall", "deepep", "hybridep"]),
        "latent_dim": one_of([None, None, 6]),
        "expert_linear_bias": random.random() < 0.3,
        "router_bias": random.random() < 0.3,
    }
    if family in _LATENT:
        sizes |= {"q_lora_rank": one_of([None, 5, 8]), "kv_lora_rank": random.randint(5, 12)}
        sizes |= {"qk_nope_head_dim": one_of([2, 4]), "v_head_dim": one_of([2, 3, 4])}
    else:
        sizes |= {"num_kv_heads": one_of([1, 2, 4, 4, 8]), "head_dim": one_of([2, 4, 6])}
    if family in _DENSE_FIRST:
        sizes |= {"num_dense_layers": random.randint(0, 2), "ffn_dim": random.randint(8, 24)}
        sizes |= {"shared_hidden_dim": random.randint(6, 12), "shared_gate": random.random() < 0.3}
    if family == "deepseek_v3":
        sizes["num_groups"] = one_of([g for g in (1, 2, 3, 4) if experts % g == 0])
        sizes["topk_groups"] = random.randint(1, sizes["num_groups"])
    return sizes
