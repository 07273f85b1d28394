"""Predicted bytes of parameters, gradients and optimizer state against those of real modules and optimizers."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_moe import models
from titan_moe.config import JobConfig
from titan_moe.config.degrees import reshard_after_forward
from titan_moe.models.count import mtp_is_dense, shape_of
from titan_moe.optim import build_optimizer
from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.layout import Stage
from titan_moe.parallelize.mesh import build_meshes
from titan_moe.parallelize.split import split_model
from titan_moe.planner.command import own_options
from titan_moe.planner.memory import rank_memory, stage_parameters
from titan_moe.planner.parameters import stage_entries
from titan_moe.planner.run import Options, plan_of
from titan_moe.planner.systems import system_of

GIB = 2**30
RULES = [
    {"pattern": "layers.1.**", "optimizer": "AdamW"},
    {"pattern": "**.experts.w2", "optimizer": "Muon"},
    {"pattern": "lm_head.weight", "optimizer": "Muon"},
]
STORED = {
    "plain": {},
    "bf16 moments": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "scaled moments": {"exp_avg_dtype": "float8", "exp_avg_sq_dtype": "float16"},
    "masters": {"dtype": "bfloat16", "master_dtype": "float32", "main_grad_dtype": "float32"},
    "scaled masters": {"dtype": "bfloat16", "master_dtype": "float16", "exp_avg_dtype": "float8"},
    "remainders": {"dtype": "bfloat16", "store_param_remainders": True, "exp_avg_dtype": "bfloat16"},
    "low gradients": {"main_grad_dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "muon": {"name": "Muon", "exp_avg_dtype": "bfloat16"},
    "muon, masters": {"name": "Muon", "dtype": "bfloat16", "master_dtype": "float32"},
    "rules": {"name": "Muon", "groups": RULES},
}


def job(family: str, override: dict | None = None, *, dtype: str = "float32", **optimizer) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.override = family, override or {}
    config.training.dtype, config.training.seq_len = dtype, 32
    for name, value in optimizer.items():
        setattr(config.optimizer, name, value)
    return config


def predicted(config: JobConfig, world: int = 1, rank: int = 0) -> list[float]:
    shape, run = plan_of(config, world, own_options(config, Options(device="cpu")), system_of("h100"))
    memory = rank_memory(shape, run, rank)
    return [memory[name] * GIB for name in ("weights", "gradients", "optimizer")]


def stepped(modules: list[nn.Module], config: JobConfig) -> list[int]:
    """Bytes on this rank of parameters, gradients, state on the device and on the host, after one step."""
    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    optimizer = build_optimizer(model, config.optimizer)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.backward(torch.ones_like(parameter))
    optimizer.step()

    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    held = [sum(local(t).nbytes for t in tensors) for tensors in (parameters, [p.grad for p in parameters])]
    return [*held, *optimizer.state_bytes()]


def built(config: JobConfig) -> nn.Module:
    torch.set_default_dtype(getattr(torch, config.training.dtype))
    try:
        return models.build(config.model.name, "debug", **config.model.override)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "override",
    [
        {},
        {"mtp_depth": 2, "latent_dim": 32, "tie_embeddings": True},
        {"mtp_depth": 1, "mtp_own_embeddings": True, "num_layers": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_names_and_sizes_are_those_of_the_modules(family, override):
    settings = models.config(family, "debug", **override)
    with torch.device("meta"):
        real = models.from_config(settings)
    s = shape_of(settings)
    found: dict[str, list] = {}
    whole = Stage(True, tuple(range(s.num_layers)), tuple(range(s.mtp)), True)
    for prefix, times, entries in stage_entries(s, whole, mtp_is_dense(s)):
        for name, elements, last, _ in entries:
            known = found.setdefault(prefix + name, [0, elements, last])
            assert known[1:] == [elements, last]
            known[0] += times
    expected: dict[str, list] = {}
    for name, parameter in real.named_parameters():
        star = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        last = parameter.shape[-1] if parameter.ndim > 1 else 0
        expected.setdefault(star, [0, parameter.numel(), last])[0] += 1
    assert found == expected


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_cuts_are_those_of_the_counts(family, tp):
    heads = {} if models.config(family, "debug").attention(0).latent else {"num_kv_heads": 2}
    config = job(family, {"mtp_depth": 1, **heads})
    config.parallelism.tensor_parallel_degree = config.parallelism.expert_parallel_degree = tp
    s, run = plan_of(config, tp, own_options(config, Options()), system_of("h100"))
    dense = expert = 0.0
    for _, times, entries in stage_entries(s, run.stages[0], mtp_is_dense(s)):
        for _, elements, _, cut in entries:
            dense += times * elements / (tp if cut == "tp" else 1) * (cut != "ep")
            expert += times * elements / tp * (cut == "ep")
    assert [dense, expert] == pytest.approx(stage_parameters(s, run, run.stages[0]), rel=1e-12)


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_bytes_are_those_of_the_real_optimizer(family, stored):
    # A latent of 72 leaves a short block of scales in some matrices.
    odd = {"q_lora_rank": 72} if family == "deepseek_v3" else {}
    config = job(family, {"mtp_depth": 1, **odd}, **stored)
    *measured, on_host = stepped([built(config)], config)
    assert predicted(config) == pytest.approx(measured, rel=1e-12)
    assert on_host == 0


@pytest.mark.parametrize("keys", [{"offload_fraction": 1.0}, {"offload_fraction": 0.5}, {"cpu_step_fraction": 0.4}])
def test_what_is_offloaded_is_not_on_the_device(keys):
    config = job("qwen3_moe", **keys)
    model = built(config)
    *_, here, away = stepped([model], config)
    # Whole parameters travel: the last one may be more than was asked for.
    largest = 8 * max(parameter.numel() for parameter in model.parameters())
    left = predicted(config)[2]
    assert left - largest <= here <= left + 1e-6
    assert here + away == pytest.approx(predicted(job("qwen3_moe"))[2])


LAYOUTS = {
    "fsdp": {},
    "hsdp": {"data_parallel_replicate_degree": 2},
    "tp, ep": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "ep": {"expert_parallel_degree": 4},
    "etp": {"expert_tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
}


def stepped_under(layout: str, stored: dict) -> list[int]:
    config = under(layout, stored)
    meshes = build_meshes(config.parallelism)
    torch.set_default_dtype(getattr(torch, config.training.dtype))
    try:
        settings = models.config(config.model.name, "debug", **config.model.override)
        stages = split_model(settings, config.parallelism, meshes.dense.get_local_rank("pp")).values()
    finally:
        torch.set_default_dtype(torch.float32)
    for stage in stages:
        parallelize(stage, meshes, reshard_after_forward=reshard_after_forward(config.parallelism))
        stage.to_empty(device="cpu")
    for parameter in nn.ModuleList(stages).parameters():
        nn.init.zeros_(parameter)
    return stepped(list(stages), config)


def under(layout: str, stored: dict) -> JobConfig:
    config = job("deepseek_v3", {"mtp_depth": 1}, **stored)
    config.training.local_batch_size = 4
    for key, value in LAYOUTS[layout].items():
        setattr(config.parallelism, key, value)
    return config


@pytest.mark.parametrize("stored", ["plain", "remainders", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_every_rank(run_ranks, layout, stored):
    real = run_ranks(4, stepped_under, layout, STORED[stored])
    config = under(layout, STORED[stored])
    stages = 2 if layout == "pp" else 1
    for rank, (weights, gradients, state, _) in enumerate(real):
        want = predicted(config, 4, rank * stages // 4)
        # Between passes a pipeline also keeps what it gathered.
        checked = slice(2, 3) if stages > 1 else slice(0, 3)
        assert want[checked] == pytest.approx([weights, gradients, state][checked], rel=2e-3)
