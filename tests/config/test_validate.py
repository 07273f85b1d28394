"""Rules across keys, each refused in one line with the value, the rule and the way out."""

import os
from pathlib import Path

import pytest

from titan_moe.config import (
    JobConfig,
    load_config,
    model_overrides,
    resolve_batch,
    resolve_degrees,
    resolved_seed,
    validate,
)
from titan_moe.errors import ConfigError


def configure(folder: Path, *argv: str) -> JobConfig:
    return load_config(["--job.dump_folder", str(folder / "out"), *argv])


def test_the_defaults_are_valid_and_the_dump_folder_is_made(tmp_path):
    validate(configure(tmp_path), 1)
    assert (tmp_path / "out").is_dir() and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        "--checkpoint.keep_latest_k 1",
        "--training.steps 1",  # fewer than the default warm-up: the schedule caps it
        "--training.max_norm 0",
        "--validation.enable --validation.steps -1",
        "--training.mixed_precision_param float16",
        "--training.dtype float64",
        "--lr_scheduler.decay_ratio 1",
        "--training.dtype bfloat16 --optimizer.stochastic_rounding",
        "--training.dtype bfloat16 --optimizer.store_param_remainders --optimizer.exp_avg_dtype float8",
    ],
)
def test_legal_settings_pass(tmp_path, options):
    validate(configure(tmp_path, *options.split()), 2)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--training.steps 0", ["training.steps = 0", "at least 1"]),
        ("--training.seq_len 0", ["training.seq_len = 0", "at least 1"]),
        ("--training.local_batch_size 0", ["training.local_batch_size = 0"]),
        ("--training.seed -1", ["training.seed = -1"]),
        ("--debug.seed 9223372036854775808", ["debug.seed", "2**63"]),
        ("--metrics.log_freq 0", ["metrics.log_freq = 0"]),
        ("--optimizer.lr 0", ["optimizer.lr = 0.0", "greater than 0"]),
        ("--optimizer.lr nan", ["optimizer.lr = nan", "finite"]),
        ("--optimizer.beta2 1", ["optimizer.beta2 = 1.0", "less than 1"]),
        ("--optimizer.beta1 -0.1", ["optimizer.beta1 = -0.1"]),
        ("--optimizer.eps 0", ["optimizer.eps = 0.0"]),
        ("--optimizer.weight_decay -1", ["optimizer.weight_decay"]),
        ("--optimizer.offload_fraction 1.5", ["optimizer.offload_fraction = 1.5", "between 0 and 1"]),
        ("--optimizer.cpu_step_fraction -1", ["optimizer.cpu_step_fraction = -1.0"]),
        ("--optimizer.qk_clip_threshold 0", ["qk_clip_threshold = 0.0", "greater than 0"]),
        ("--optimizer.qk_clip_threshold 100 --compile.enable", ["qk_clip_threshold with compile.enable"]),
        ("--optimizer.muon_momentum 1", ["optimizer.muon_momentum = 1.0"]),
        ("--optimizer.muon_ns_steps 0", ["optimizer.muon_ns_steps = 0"]),
        ("--optimizer.master_dtype float32", ["master_dtype = 'float32'", "training.dtype = 'bfloat16'"]),
        ("--optimizer.store_param_remainders", ["store_param_remainders = True", "training.dtype = 'bfloat16'"]),
        ("--optimizer.stochastic_rounding", ["stochastic_rounding", "nothing is stored"]),
        (
            "--training.dtype bfloat16 --optimizer.store_param_remainders --optimizer.master_dtype float32",
            ["two masters"],
        ),
        ("--lr_scheduler.warmup_steps -1", ["lr_scheduler.warmup_steps = -1"]),
        ("--lr_scheduler.decay_ratio 1.5", ["lr_scheduler.decay_ratio = 1.5", "between 0 and 1"]),
        ("--lr_scheduler.min_lr_factor 2", ["lr_scheduler.min_lr_factor = 2.0"]),
        ("--checkpoint.keep_latest_k -1", ["checkpoint.keep_latest_k = -1"]),
        ("--checkpoint.interval 0", ["checkpoint.interval = 0"]),
        ("--checkpoint.max_steps_ahead 2", ["max_steps_ahead needs checkpoint.enable"]),
        ("--checkpoint.enable --checkpoint.max_steps_ahead 2", ["max_steps_ahead = 2", "'disabled'"]),
        (
            "--checkpoint.enable --checkpoint.async_mode async --checkpoint.interval 5 --checkpoint.max_steps_ahead 5",
            ["max_steps_ahead = 5", "interval = 5"],
        ),
        ("--checkpoint.load_step -2", ["checkpoint.load_step = -2"]),
        ("--checkpoint.enable --checkpoint.initial_load_path nowhere", ["initial_load_path = 'nowhere'"]),
        ("--checkpoint.initial_load_path .", ["checkpoint.enable"]),
        ("--checkpoint.initial_load_in_hf", ["needs checkpoint.initial_load_path"]),
        ("--checkpoint.load_step 3", ["checkpoint.load_step needs checkpoint.enable"]),
        ("--checkpoint.enable --checkpoint.load_step 3", ["checkpoint.load_step = 3: no step-3 in"]),
        (
            "--checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.initial_load_path .",
            ["initial_load_path = '.': no config.json"],
        ),
        ("--profiling.enable_profiling --profiling.profile_freq 1", ["profile_freq = 1: must be at least 2"]),
        ("--training.local_batch_size 9999999999999", ["local_batch_size = 9999999999999", "at most 1048576"]),
        ("--training.local_batch_size 1048576", ["2147483648 tokens", "at most 268435456"]),
        (f"--training.global_batch_size {10**23}", ["global_batch_size", "at most 16777216"]),
        ("--training.num_workers -1", ["training.num_workers = -1", "at least 0"]),
        ("--training.num_workers 100000", ["num_workers = 100000", "at most 1024"]),
        ("--model.override.num_layers 9999999", ["num_layers = 9999999", "at most 10000"]),
        (f"--model.override.dim {10**12}", ["model.override.dim", "at most 2147483648"]),
        (f"--moe.pad_counts_to {10**30}", ["moe.pad_counts_to", "at most 1048576"]),
        ("--comm.train_timeout_seconds 0", ["comm.train_timeout_seconds = 0"]),
        ("--validation.enable --validation.freq 0", ["validation.freq = 0"]),
        ("--validation.enable --validation.steps 0", ["validation.steps = 0", "-1"]),
        ("--validation.enable --validation.fraction 1", ["validation.fraction = 1.0"]),
        ("--validation.enable --validation.dataset text", ["validation.dataset_path"]),
        ("--training.dataset stdlb", ["training.dataset = 'stdlb'", "Did you mean 'stdlib'?"]),
        ("--training.dataset text", ["needs training.dataset_path"]),
        ("--training.dataset text --training.dataset_path nowhere", ["'nowhere': no such file or folder"]),
        ("--model.tokenizer nowhere.json", ["model.tokenizer = 'nowhere.json'", "'bytes'"]),
    ],
)
def test_illegal_settings_are_refused(tmp_path, options, parts):
    with pytest.raises(ConfigError) as caught:
        validate(configure(tmp_path, *options.split()), 1)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    # Refused before anything was written.
    assert not (tmp_path / "out").exists()


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file: .*tokenizer\.json"):
        validate(configure(tmp_path, "--model.tokenizer", str(tmp_path)), 1)
    (tmp_path / "tokenizer.json").write_text("{}")
    validate(configure(tmp_path, "--model.tokenizer", str(tmp_path)), 1)


def test_missing_packages_are_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for options, package in [
        ("--metrics.enable_wandb", "wandb"),
        (f"--training.dataset parquet --training.dataset_path {tmp_path}", "pyarrow"),
        (f"--training.dataset huggingface --training.dataset_path {tmp_path}", "datasets"),
    ]:
        with pytest.raises(ConfigError, match=f"needs the package {package}.*pip install"):
            validate(configure(tmp_path, *options.split()), 1)


def test_an_unwritable_dump_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        config = load_config(["--job.dump_folder", str(folder)])
        with pytest.raises(ConfigError, match="cannot be written"):
            validate(config, 1)


def test_memory_snapshots_without_a_gpu_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"enable_memory_snapshot = true needs a CUDA GPU"):
        validate(configure(tmp_path, "--profiling.enable_memory_snapshot"), 1)
    assert not (tmp_path / "out").exists()


def test_an_unusable_checkpoint_folder_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint\.folder = .*cannot be written \(File exists\)"):
        validate(configure(tmp_path, "--checkpoint.enable"), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_dump_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        validate(configure(tmp_path), 1)


@pytest.mark.parametrize(
    ("world", "replicate", "shard", "degrees"),
    [(1, 1, -1, (1, 1)), (8, 1, -1, (1, 8)), (8, 2, -1, (2, 4)), (8, 2, 4, (2, 4)), (6, 6, 1, (6, 1))],
)
def test_data_parallel_degrees_factor_the_world(world, replicate, shard, degrees):
    config = JobConfig()
    config.parallelism.data_parallel_replicate_degree = replicate
    config.parallelism.data_parallel_shard_degree = shard
    found = resolve_degrees(config.parallelism, world)
    assert (found.dp_replicate, found.dp_shard) == degrees


@pytest.mark.parametrize(
    ("total", "local", "processes", "batch"),
    [
        (-1, 8, 4, (8, 32, 1)),
        (32, 8, 4, (8, 32, 1)),
        (32, 4, 2, (4, 32, 4)),
        (6, 1, 3, (1, 6, 2)),
        (12, -1, 1, (12, 12, 1)),
        (12, -1, 4, (3, 12, 1)),
    ],
)
def test_global_batch_gives_the_accumulation(total, local, processes, batch):
    config = JobConfig()
    config.training.global_batch_size, config.training.local_batch_size = total, local
    assert resolve_batch(config, processes) == batch


@pytest.mark.parametrize(
    ("total", "local", "processes", "way_out"),
    [
        (30, 4, 2, "Nearest legal: 24 or 32"),
        (4, 4, 2, "Nearest legal: 8; -1 means 8. Or set training.local_batch_size = 2, or -1."),
        (6, -1, 4, "Nearest legal global sizes: 4 or 8"),
        (-1, -1, 2, "Nearest legal global sizes: 2"),
        (0, 4, 2, "Nearest legal: 8"),
        (-2, 4, 2, "Nearest legal: 8"),
    ],
)
def test_a_global_batch_that_does_not_divide_names_the_nearest(total, local, processes, way_out):
    config = JobConfig()
    config.training.global_batch_size, config.training.local_batch_size = total, local
    with pytest.raises(ConfigError) as caught:
        resolve_batch(config, processes)
    assert f"global_batch_size = {total}" in str(caught.value) and way_out in str(caught.value)


def test_debug_seed_beats_training_seed():
    assert resolved_seed(load_config(["--training.seed", "3"])) == 3
    assert resolved_seed(load_config(["--training.seed", "3", "--debug.seed", "0"])) == 0


def test_model_overrides_merge_moe_keys_under_the_override_table():
    assert model_overrides(JobConfig()) == {"experts": "grouped", "save": "preact"}
    config = load_config(
        [
            *("--moe.force_balance", "--moe.capacity_factor", "1.5", "--moe.jitter", "0"),
            *("--moe.experts", "sequential", "--model.override.capacity_factor", "2.0"),
            *("--model.override.num_experts", "16"),
        ]
    )
    assert model_overrides(config) == {
        "experts": "sequential",
        "save": "preact",
        "selection": "round_robin",
        "capacity_factor": 2.0,
        "jitter": 0.0,
        "num_experts": 16,
    }
