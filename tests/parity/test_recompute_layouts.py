"""Recompute of named parts changes no bit under any layout: losses, gradients, norms, routing counters."""

import pytest
import torch
from layout_run import Run
from layout_table import MATRIX
from model_case import STEPS, Case, batch_of, local
from torch import nn

from titan_moe.parallelize import build_meshes
from titan_moe.plugins.recompute import recompute_targets
from titan_moe.plugins.targets import RECOMPUTE

pytestmark = pytest.mark.slow

LAYOUTS = (
    "dp8 [qwen3_moe]",
    "hsdp2x4 [deepseek_v3]",
    "tp2 [deepseek_v3]",
    "tp4 no sequence parallel [qwen3_moe]",
    "cp8 alltoall [qwen3_moe]",
    "cp2 [deepseek_v3]",
    "ep8 [deepseek_v3]",
    "etp2 [qwen3_moe]",
    "pp2 gpipe [deepseek_v3]",
    "pp4 1f1b [deepseek_v3]",
    "pp2 interleaved [deepseek_v3]",
    "pp2 looped bfs [qwen3_moe]",
    "pp2 zero bubble [deepseek_v3]",
    "pp2 zbv [deepseek_v3]",
    "pp4 dualpipev [deepseek_v3]",
    "tp2 ep8 [deepseek_v3]",
    "ep8 over dp2 cp2 tp2 [deepseek_v3]",
    "ep2 etp2 over pp2 tp2 cp2 [deepseek_v3]",
    "accumulation hsdp ep [qwen3_moe]",
    "gpt_oss tp ep etp [gpt_oss]",
    "one process [deepseek_v3]",
)
FINE = ("layernorm", "qk_norm", "mla_up_proj", "core_attn", "moe_act", "**.o_proj")
COARSE = ("layernorm", "mlp", "moe", "core_attn")
SHARED = ("layernorm", "mlp", "shared_expert", "mla_up_proj")


def step(run: Run, number: int) -> dict[str, torch.Tensor]:
    """Everything that a step makes on this rank."""
    torch.manual_seed(number)  # jitter
    made = {"losses": run.backward(batch_of(run.case, number))}
    made |= {f"gradient of {name}": local(p.grad).clone() for name, p in run.named("parameters")}
    norm, report = run.finish()
    return made | {"norm": norm} | {key: value for key, value in report.items() if key != "names"}


def differences(case: Case, targets: tuple[str, ...]) -> tuple[int, list[str]]:
    """How many parts of this rank's modules are recomputed, and what differs from the run without."""
    meshes, parts = build_meshes(case.parallelism()), []

    def prepare(module: nn.Module) -> nn.Module:
        parts.extend(recompute_targets(module, targets))
        return module

    runs = [Run(case, meshes), Run(case, meshes, prepare)]
    different = []
    for number in range(STEPS):
        want, got = (step(run, number) for run in runs)
        different += [f"step {number}: {key}" for key in want if not torch.equal(want[key], got[key])]
    return len(parts), different


@pytest.mark.parametrize("targets", [FINE, COARSE, SHARED], ids=["fine", "coarse", "shared"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_named_parts_change_no_bit(run_ranks, name, targets):
    case = MATRIX[name]
    case = Case(**{**vars(case), "override": {**case.override, "jitter": 0.05}})
    results = run_ranks(case.ranks, differences, case, targets)
    assert sum(parts for parts, _ in results) > 0
    assert [different for _, different in results] == [[]] * case.ranks


@pytest.mark.parametrize("number", range(len(RECOMPUTE)), ids=list(RECOMPUTE))
def test_each_part_alone_changes_no_bit(run_ranks, number):
    target = list(RECOMPUTE)[number]
    names = ("tp2 ep8 [deepseek_v3]", "pp2 zbv [deepseek_v3]")
    for name in names:
        results = run_ranks(8, differences, MATRIX[name], (target,))
        assert sum(parts for parts, _ in results) > 0
        assert [different for _, different in results] == [[]] * 8
