"""What recompute takes off a rank's saved activations, by layout: planned against a dry run of the real modules."""

import pytest

from titan_moe import models
from titan_moe.config import JobConfig
from titan_moe.dry_run import fake_run
from titan_moe.errors import ConfigError
from titan_moe.planner.command import main as plan
from titan_moe.planner.command import not_priced, own_options
from titan_moe.planner.memory import kept_bytes
from titan_moe.planner.run import OWN_OFFLOAD, OWN_RECOMPUTE, Options, plan_of
from titan_moe.planner.systems import system_of
from titan_moe.plugins.offload import OFFLOAD
from titan_moe.plugins.savings import savings
from titan_moe.plugins.targets import RECOMPUTE

V3 = "deepseek_v3"
FINE = ["layernorm", "moe_act", "mla_up_proj", "core_attn"]


def job(family: str, targets=(), *, dtype="float32", seq=256, **keys) -> JobConfig:
    config = JobConfig()
    heads = {} if models.config(family, "debug").attention(0).latent else {"num_kv_heads": 2}
    config.model.name, config.model.override = family, {"num_layers": 2, **heads}
    config.training.seq_len, config.training.local_batch_size = seq, 2
    config.training.dtype, config.training.document_mask = dtype, False
    for key, value in keys.items():
        setattr(config.parallelism, key, value)
    if targets:
        config.activation_checkpoint.mode = "targets"
        config.activation_checkpoint.targets = list(targets)
    return config


def planned(config: JobConfig, world: int) -> list[float]:
    shape, run = plan_of(config, world, own_options(config, Options(device="cpu")), system_of("h100"))
    return [kept_bytes(shape, run, run.stages[rank]) for rank in range(run.pp)]


TP, CP, EP, ETP = (f"{name}_parallel_degree" for name in ("tensor", "context", "expert", "expert_tensor"))
SEQUENCE, METHOD = "enable_sequence_parallel", "context_parallel_method"


@pytest.mark.parametrize("targets", [[], FINE], ids=["plain", "fine"])
@pytest.mark.parametrize(
    ("family", "dtype", "keys", "world"),
    [
        (V3, "bfloat16", {TP: 2}, 2),
        (V3, "bfloat16", {TP: 2, EP: 2}, 2),
        (V3, "float32", {TP: 2, SEQUENCE: False}, 2),
        (V3, "bfloat16", {CP: 2}, 2),
        (V3, "float32", {CP: 2, METHOD: "alltoall"}, 2),
        ("qwen3_moe", "float32", {TP: 2}, 2),
        ("qwen3_moe", "bfloat16", {EP: 2}, 2),
        ("qwen3_moe", "float32", {CP: 2}, 2),
        ("qwen3_moe", "float32", {ETP: 2}, 2),
        ("qwen3_moe", "float32", {"pipeline_parallel_degree": 2}, 2),
        ("minimax_m2", "bfloat16", {TP: 2}, 2),
        ("gpt_oss", "float32", {TP: 2, EP: 4}, 4),
        ("qwen2_moe", "bfloat16", {TP: 2, EP: 2}, 2),
    ],
)
def test_a_rank_keeps_what_is_planned(family, dtype, keys, world, targets):
    known = models.config(family, "debug").attention(0).latent
    dense_or_shared = family in (V3, "qwen2_moe")
    targets = [t for t in targets if (known or t != "mla_up_proj") and (dense_or_shared or t != "moe_act")]
    config = job(family, targets, dtype=dtype, **keys)
    real = fake_run(config, 0, world).stages
    # Without the spare row of the experts and a few tables; the queries' copies of all-to-all attention.
    rel = 0.015 if METHOD in keys else 0.005
    assert planned(config, world)[: len(real)] == pytest.approx([s.saved_bytes for s in real], rel=rel)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (V3, ["full"]),
        *((V3, [target]) for target in ("core_attn", "mla_up_proj", "moe", "mlp", "moe_act", "qk_norm")),
        (V3, [target for target in OWN_RECOMPUTE if target != "full"]),
        ("gpt_oss", ["core_attn"]),
        ("minimax_m2", ["qk_norm", "layernorm"]),
        ("qwen2_moe", ["shared_expert"]),
    ],
    ids=str,
)
def test_each_target_takes_off_what_is_planned(family, targets):
    plain, some = job(family), job(family, targets)
    if targets == ["full"]:
        some.activation_checkpoint.mode, some.activation_checkpoint.targets = "full", []
    real = fake_run(plain, 0, 1).stages[0].saved_bytes - fake_run(some, 0, 1).stages[0].saved_bytes
    assert planned(plain, 1)[0] - planned(some, 1)[0] == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize(
    ("save", "keys"),
    [("preact", {}), ("input", {EP: 2}), ("preact_fp8", {EP: 2, TP: 2})],
)
@pytest.mark.parametrize("bound", [None, 1.0, 1.3, 16.0])
def test_experts_save_and_room_for_rows(save, keys, bound):
    config = job("qwen3_moe", **{EP: 2} | keys)
    config.moe.save, config.moe.recv_capacity_factor = save, bound
    assert planned(config, 2)[0] == pytest.approx(fake_run(config, 0, 2).stages[0].saved_bytes, rel=0.001)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_tables_formulas_are_the_planners(family):
    config = job(family, seq=64)
    settings = models.config(family, "debug", **config.model.override)
    shape, run = plan_of(config, 1, own_options(config, Options()), system_of("h100"))
    before = kept_bytes(shape, run, run.stages[0])
    for target, saving in savings(settings, run.mbs * run.seq, run.seq, 4).items():
        run.recompute = [target]
        # A router's sum and which of its rows are finite are not counted apart.
        wanted = pytest.approx(saving.nbytes, rel=0.01)
        if not (shape.sinks and target == "core_attn"):
            assert before - kept_bytes(shape, run, run.stages[0]) == wanted, target


def test_names_are_those_of_the_plugins():
    assert set(OWN_RECOMPUTE) == {*RECOMPUTE, "full"}
    assert set(OWN_OFFLOAD) == OFFLOAD.keys()


def test_offloaded_rows_leave_by_their_share_and_size():
    config = job(V3)
    everything = planned(config, 1)[0]
    config.activation_offload.targets = ["core_attn"]
    config.activation_offload.min_bytes = 0
    away = everything - planned(config, 1)[0]
    # Queries, keys, pieces of 2 heads of 64, what kv_b made of 2 times 32 + 64, and one sum for each head, in fp32.
    assert away == 2 * 512 * (3 * 2 * 64 + 2 * 96 + 2) * 4
    config.activation_offload.fraction = 0.5
    assert everything - planned(config, 1)[0] == away / 2
    config.activation_offload.min_bytes = 1 << 30
    assert planned(config, 1)[0] == everything


def test_what_is_not_priced_is_said_and_what_is_not_there_refused(capsys):
    config = job(V3, ["layernorm", "**.o_proj"])
    assert not_priced(config) == ["activation_checkpoint.targets: '**.o_proj'"]
    words = ["--config", "train_configs/debug.toml", "--activation_checkpoint.mode"]
    plan([*words, "selective"], 1)
    assert "not priced" in capsys.readouterr().out
    for targets, says in ((["mla_up_proj"], "matched nothing"), (["layer_norm"], "Did you mean 'layernorm'")):
        with pytest.raises(ConfigError, match=says):
            plan([*words, "targets", "--activation_checkpoint.targets", *targets], 1)
    with pytest.raises(ConfigError, match="--recompute with --config"):
        plan(["--config", "train_configs/debug.toml", "--recompute", "full"], 1)
