"""Checkpoints of one model under many layouts, and what they must hold: whole tensors, put together by DTensor."""

import os

import torch
import torch.distributed as dist
from layout_run import EXACT, Run, relative, run_part
from layout_table import make
from model_case import Case, batch_of, local
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.checkpoint import Checkpointer
from titan_moe.parallelize import build_meshes

SAVED_STEP = 2

# Nine experts over ep 2 and then edp 4; all other dims are odd where a layout cuts them.
_ODD = {"num_experts": 9, "num_groups": 1, "topk_groups": 1, "vocab_size": 41, "ffn_dim": 22, "hidden_dim": 11}
_ODD |= {"shared_hidden_dim": 11, "dim": 12, "q_lora_rank": 7, "kv_lora_rank": 9}
_SEQUENTIAL = {"experts": "sequential"}
LAYOUTS: dict[str, Case] = {
    "one": make(ranks=1, **_ODD),
    "dp2": make(ranks=2, **_ODD, **_SEQUENTIAL),
    "dp8": make(**_ODD),
    "hsdp2x4 ep2": make(dpr=2, ep=2, **_ODD),
    "ep2 edp4": make(ep=2, **_ODD),
    "tp4 ep2": make(tp=4, ep=2, **_ODD, **_SEQUENTIAL),
    "tp2 ep2 etp2": make(tp=2, ep=2, etp=2, **_ODD),
    "cp2 tp4 ep2 etp4": make(cp=2, tp=4, ep=2, etp=4, **_ODD),
    "hsdp cp2 etp2": make(dpr=2, cp=2, etp=2, **_ODD),
    "pp2 tp2 ep2": make(pp=2, tp=2, ep=2, **_ODD),
    "pp2 vpp2 cp2 ep2": make(pp=2, vpp=2, schedule="DualPipeV", cp=2, ep=2, **_ODD),
    "pp4": make(pp=4, ranks=4, **_ODD, **_SEQUENTIAL),
}

_FIFTEEN = {**_ODD, "num_experts": 15}
FIFTEEN: dict[str, Case] = {
    "one 15": make(ranks=1, **_FIFTEEN),
    "ep8 15": make(ep=8, **_FIFTEEN),
    "ep4 15": make(ep=4, tp=2, **_FIFTEEN),
    "ep2 15": make(ep=2, dpr=2, **_FIFTEEN),
    "pp2 ep4 15": make(pp=2, ep=4, **_FIFTEEN),
}


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Every parameter, persistent buffer, moment and step count of this rank, by name; of copies all, numbered."""
    found: dict[str, Tensor] = {}
    for number, module in enumerate(run.modules):
        for name, value in module.state_dict(keep_vars=True).items():
            key = name if name not in found else f"{name}#{number}"
            found[key] = value.detach()
            for moment, state in run.optimizer.state.get(value, {}).items():
                found[f"{key}|{moment}"] = state
    return found


def one_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    losses = run.backward(batch_of(run.case, step))
    norm, _ = run.finish()
    return losses, norm


def whole(run: Run) -> dict[str, Tensor]:
    tensors = tensors_of(run).items()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors}


def train_and_save(case: Case, folder: str) -> dict:
    """Two steps and a checkpoint; the state then, and after one step more with its losses."""
    run = Run(case, build_meshes(case.parallelism()))
    for step in range(SAVED_STEP):
        one_step(run, step)
    checkpointer = Checkpointer(folder)
    checkpointer.save(SAVED_STEP, run.modules, run.optimizer, extra={"layout": case.degrees})
    before = whole(run)
    losses, norm = one_step(run, SAVED_STEP)
    return {"before": before, "after": whole(run), "losses": losses, "norm": norm}


def load_and_compare(case: Case, folder: str, sources: list[str], same: str) -> dict[str, float]:
    """Load each of ``sources`` and train a step on it; the largest relative error of each, 0 for the same layout."""
    run = Run(case, build_meshes(case.parallelism()))
    worst = {}
    for source in sources:
        with torch.no_grad():
            for tensor in tensors_of(run).values():
                if tensor.is_floating_point():
                    local(tensor).fill_(torch.nan)
        want = torch.load(os.path.join(folder, f"{source}.pt"))
        assert Checkpointer(os.path.join(folder, source), read_only=True).load(run.modules, run.optimizer).step == 2
        got = tensors_of(run)
        for name, tensor in got.items():
            assert part_error(tensor, want["before"][name.partition("#")[0] + moment_of(name)]) == 0, (source, name)
        losses, norm = one_step(run, SAVED_STEP)
        errors = {"losses": relative(losses, want["losses"]), "norm": relative(norm, want["norm"])}
        for name, tensor in tensors_of(run).items():
            errors[name] = part_error(tensor, want["after"][name.partition("#")[0] + moment_of(name)])
        bound = 0.0 if source == same else EXACT
        wrong = {name: error for name, error in errors.items() if not error <= bound}
        assert not wrong, (source, dist.get_rank(), wrong)
        worst[source] = max(errors.values())
    return worst


def moment_of(name: str) -> str:
    """``|exp_avg`` of a numbered copy's name."""
    return "|" + name.partition("|")[2] if "#" in name and "|" in name else ""


def part_error(tensor: Tensor, want: Tensor) -> float:
    assert tensor.dtype == want.dtype
    if isinstance(tensor, DTensor):
        return run_part(tensor, local(tensor), want)
    return relative(tensor.double(), want.double())
