"""What a prediction means in words: which wall binds it, and what would make it fit."""

from dataclasses import replace

from titan_moe.models.count import Shape
from titan_moe.planner.memory import rank_memory
from titan_moe.planner.predict import predict
from titan_moe.planner.run import Run
from titan_moe.planner.systems import System

WALLS = {
    "communication": ("all-to-all", "tensor parallel", "context parallel", "data parallel", "bubble"),
    "compute": ("attention linears", "attention", "experts", "shared and dense", "head", "recompute"),
    "memory traffic": ("elementwise", "optimizer", "offload"),
    "host": ("host",),
}


def shares(result: dict) -> dict[str, float]:
    """Each component's share of the step, the largest first."""
    step = result["step_time_s"]
    return dict(sorted(((k, v / step) for k, v in result["time_s"].items()), key=lambda pair: -pair[1]))


def binding_wall(result: dict) -> str:
    """The wall that a run stands at: ``memory`` where under a tenth of it is left, else where the most time goes."""
    if result["memory_gib"]["total"] > 0.9 * result["limit_gib"]:
        return "memory"
    parts = result["time_s"]
    return max(WALLS, key=lambda wall: sum(parts.get(name, 0) for name in WALLS[wall]))


def _options(s: Shape, run: Run) -> list[tuple[str, str, Run]]:
    """Single changes that save memory: the key that each sets, how it is asked for, and the run with it."""
    choices = []
    if run.engine == "titan":
        key = "--activation_checkpoint"
        if not run.recompute:
            fine = ["layernorm", "core_attn", *(["mla_up_proj"] if s.latent else [])]
            text = f"{key}.mode targets {key}.targets {' '.join(fine)}"
            choices.append((key, text, replace(run, recompute=fine)))
        if "full" not in run.recompute:
            choices.append((key, f"{key}.mode full", replace(run, recompute=["full"])))
        if run.state_away == 0:
            here = {name: [weight, gradient, 0] for name, (weight, gradient, _) in run.stored.items()}
            text = "--optimizer.offload_fraction 1"
            choices.append((text, text, replace(run, stored=here, state_away=run.state_bytes)))
        return choices
    if not run.memory_efficient_permutation:
        choices.append(("--memory-efficient-permutation", replace(run, memory_efficient_permutation=True)))
    if run.state_bytes > 8:
        choices.append(("--moments bf16", replace(run, state_bytes=8, state_away=min(run.state_away, 8))))
    targets = ["layernorm", "moe_act", *(["mla_up_proj"] if s.latent else []), *(["mlp"] if s.num_dense else [])]
    choices += [
        (f"--recompute {target}", replace(run, recompute=[*run.recompute, target]))
        for target in [*targets, "shared_experts", "core_attn", "moe", "full"]
        if target not in run.recompute
    ]
    if run.state_away == 0:
        choices.append(
            ("--offload optimizer", replace(run, offload=[*run.offload, "optimizer"], state_away=run.state_bytes))
        )
    choices += [
        (f"--offload {target}", replace(run, offload=[*run.offload, target]))
        for target in ("expert_fc1", "moe_act", "core_attn")
        if target not in run.offload
    ]
    return [(text, text, changed) for text, changed in choices]


def cheapest_fit(s: Shape, run: Run, system: System) -> str | None:
    """The options that make a run fit at the least cost in time; None where no combination here does."""
    limit = predict(s, run, system)["limit_gib"]
    taken: dict[str, str] = {}
    for _ in range(4):
        tried = []
        for key, text, changed in _options(s, run):
            worst = max(rank_memory(s, changed, rank)["total"] for rank in range(run.pp))
            tried.append((taken | {key: text}, changed, worst))
        if not tried:
            return None
        fitting = [item for item in tried if item[2] <= limit]
        if fitting:
            texts, changed, _ = min(fitting, key=lambda item: predict(s, item[1], system)["step_time_s"])
            cost = predict(s, changed, system)["step_time_s"]
            return f"{' '.join(texts.values())} ({cost:.2f} s per step)"
        # Nothing alone is enough: take what saves the most for its time, and go on.
        now = max(rank_memory(s, run, rank)["total"] for rank in range(run.pp))
        before = predict(s, run, system)["step_time_s"]

        def worth(item: tuple[dict[str, str], Run, float], now: float = now, before: float = before) -> float:
            slower = predict(s, item[1], system)["step_time_s"] / before - 1
            return (now - item[2]) / (max(slower, 0) + 0.005)

        taken, run, _ = max(tried, key=worth)
    return None


def fit_sentence(s: Shape, run: Run, system: System, result: dict) -> str:
    """Whether the run fits; if not, by how much, on which rank, and the cheapest way out."""
    limit, rank = result["limit_gib"], result["rank"]
    total = result["ranks"][rank]["total"]
    if result["fits"]:
        return f"fits: pipeline rank {rank} needs {total:.1f} of {limit:.1f} GiB"
    way = cheapest_fit(s, run, system)
    advice = f"cheapest way to fit: {way}" if way else "no recompute or offload makes it fit: use more GPUs, pp or ep"
    return (
        f"does not fit: pipeline rank {rank} needs {total:.1f} GiB, {total - limit:.1f} more than {limit:.1f}; {advice}"
    )
