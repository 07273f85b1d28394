"""Recompute of named parts and offload change no bit under any layout: losses, gradients, norms, routing counters."""

import pytest
import torch
from layout_run import Run
from layout_table import MATRIX, QWEN, V3
from model_case import STEPS, Case, batch_of, local
from torch import nn

from titan_moe.config.degrees import resolve_degrees
from titan_moe.parallelize import build_meshes
from titan_moe.parallelize.mesh import Meshes
from titan_moe.plugins.offload import OFFLOAD, offload_activations
from titan_moe.plugins.offloader import Offloader
from titan_moe.plugins.recompute import costly_operators, recompute_layers, recompute_targets
from titan_moe.plugins.streams import SimulatedCopies
from titan_moe.plugins.targets import RECOMPUTE

pytestmark = pytest.mark.slow

# Each axis alone, each way to share sequences, each schedule, experts folded over the other axes, and gradient
# accumulation over replicas: twenty of the matrix, and one process.
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
AWAY = ("attn_norm", "core_attn", "expert_fc1", "moe_act")
# Where whole layers run again, their inputs are all that can travel.
WHOLE = {"full": None, "selective": costly_operators()}
LAYERS = ("layers.*", "mtp.*")


def step(run: Run, number: int) -> dict[str, torch.Tensor]:
    """Everything that a step makes on this rank."""
    torch.manual_seed(number)  # jitter
    made = {"losses": run.backward(batch_of(run.case, number))}
    made |= {f"gradient of {name}": local(p.grad).clone() for name, p in run.named("parameters")}
    norm, report = run.finish()
    made |= {"norm": norm} | {key: value for key, value in report.items() if key != "names"}
    return made | {name: buffer.clone() for name, buffer in run.named("buffers")}


Choice = tuple[tuple[str, ...], tuple[str, ...]]


def differences(case: Case, choices: list[Choice], steps: int) -> list[tuple[int, int, list[str]]]:
    """For each choice how many parts of this rank are recomputed, bytes that left, and what differs without."""
    meshes = build_meshes(case.parallelism())
    plain = Run(case, meshes)
    want = [step(plain, number) for number in range(steps)]
    return [_differences(case, meshes, want, *choice) for choice in choices]


def _differences(
    case: Case, meshes: Meshes, want: list[dict[str, torch.Tensor]], targets: tuple[str, ...], away: tuple[str, ...]
) -> tuple[int, int, list[str]]:
    parts, offloader, stages = 0, Offloader(SimulatedCopies()), []

    def prepare(module: nn.Module) -> nn.Module:
        nonlocal parts
        if targets and targets[0] in WHOLE:
            parts += recompute_layers(module, WHOLE[targets[0]])
        else:
            parts += len(recompute_targets(module, targets))
        if away:
            offload_activations(module, away, offloader, stage=len(stages), keep_last=module.has_head)
            stages.append(module)
        return module

    run, different = Run(case, meshes, prepare), []
    for number, expected in enumerate(want):
        got = step(run, number)
        different += [f"step {number}: {key}" for key in expected if not torch.equal(expected[key], got[key])]
    return parts, offloader.left, different


def check(run_ranks, case: Case, choices: list[Choice], steps: int = STEPS) -> None:
    # One data-parallel rank needs no more rows than that many micro-batches.
    d = resolve_degrees(case.parallelism(), case.ranks)
    rows = min(case.rows, 4 * d.dp_replicate * d.dp_shard * max(case.passes, d.pp // 2))
    case = Case(**{**vars(case), "rows": rows, "override": {**case.override, "jitter": 0.05}})
    ranks = run_ranks(case.ranks, differences, case, choices, steps, timeout=300.0)
    for choice, results in zip(choices, zip(*ranks, strict=True), strict=True):
        targets, away = choice
        assert [different for _, _, different in results] == [[]] * case.ranks, choice
        assert (sum(parts for parts, _, _ in results) > 0) == bool(targets), choice
        assert (sum(left for _, left, _ in results) > 0) == bool(away), choice


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_changes(run_ranks, name):
    check(run_ranks, MATRIX[name], [(FINE, ()), (COARSE, ()), (SHARED, ()), ((), AWAY), (FINE, AWAY)])


# Latent attention, dense layers and shared experts: each target has something there.
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_target_alone_and_all_together_change_no_bit(run_ranks, name):
    case = Case(**{**vars(MATRIX[name]), "family": V3})
    choices = [((), tuple(OFFLOAD)), (tuple(RECOMPUTE), ()), (tuple(RECOMPUTE), tuple(OFFLOAD))]
    choices += [((target,), away) for target in RECOMPUTE for away in ((), tuple(OFFLOAD))]
    choices += [((target,), away) for target in WHOLE for away in ((), LAYERS)]
    check(run_ranks, case, choices, steps=1)


# Norms of heads, rotated, which latent attention has none of.
@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_of_queries_and_keys_alone_change_no_bit(run_ranks, name):
    case = Case(**{**vars(MATRIX[name]), "family": QWEN})
    check(run_ranks, case, [(("qk_norm",), away) for away in ((), tuple(OFFLOAD))], steps=1)
