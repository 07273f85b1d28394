"""One prediction: memory of every rank, the pipeline simulated, the step's time and what it is made of.

Written in the part of Python that ``to_js`` translates: the page computes with this very source.
``s`` is a ``titan_moe.models.count.Shape``, ``run`` a ``run.Run``, ``y`` a ``systems.System``.
"""

from titan_moe.models.count import active_parameters, mtp_is_dense, parameters, training_flops
from titan_moe.planner.activations import BF16, bytes_with, layer_rows
from titan_moe.planner.collectives import exchange, link, ring
from titan_moe.planner.costs import head_seconds, joint_seconds, layer_seconds, total_of
from titan_moe.planner.memory import held_stages, limit_gib, rank_memory, report_memory, stage_parameters
from titan_moe.planner.rows import tokens_of
from titan_moe.planner.schedules import folds, order_of, rank_of, round_size, simulate

SIMULATED = 9000
"""Operations above which the rounds in the middle, which repeat, are not simulated one by one."""


def add(into: dict, parts: dict, times: float) -> None:
    """Add ``times`` the values of ``parts`` to those of ``into``."""
    for name in parts:
        into[name] = (into[name] if name in into else 0) + parts[name] * times


def stage_times(s: object, run: object, y: object) -> list:
    """Seconds of one pass through each stage, ``{"forward": {component: seconds}, "input": …, "weight": …}``."""
    known = {}
    stages = []
    for stage in run.stages:
        sums = {"forward": {}, "input": {}, "weight": {}}
        layers = [[layer, layer < s.num_dense] for layer in stage.layers]
        layers.extend([[s.num_layers + depth, mtp_is_dense(s)] for depth in stage.mtp])
        for pair in layers:
            window = s.windows[pair[0]]
            key = str(window) + (" dense" if pair[1] else " moe")
            if key not in known:
                known[key] = layer_seconds(s, run, y, pair[1], window)
            for phase in sums:
                add(sums[phase], known[key][phase], 1)
        if len(stage.mtp) > 0:
            joint = joint_seconds(s, run, y) * len(stage.mtp)
            for phase in sums:
                add(sums[phase], {"head": joint}, 1)
        if stage.head:
            head = head_seconds(s, run, y) * (1 + s.mtp)
            for phase in sums:
                add(sums[phase], {"head": head}, 1)
        stages.append(sums)
    return stages


def simulated(run: object, count: int, size: int, times: list, hop: float) -> dict:
    """The pipeline with ``count`` micro-batches, in rounds of ``size``."""
    folded = folds(run.schedule)
    stages = run.pp * run.vpp
    orders = [order_of(run.schedule, rank, run.pp, run.vpp, count, size) for rank in range(run.pp)]
    result = simulate(orders, stages, [rank_of(i, run.pp, folded) for i in range(stages)], times, hop)
    result["orders"] = orders
    return result


def pipeline(run: object, times: list, hop: float) -> dict:
    """The whole step's passes; of long steps two short ones, and the difference of a round for the rest."""
    if run.pp == 1:
        each = times[0][0] + times[1][0]
        return {"end": each * run.count, "busy": [each * run.count], "orders": [], "starts": []}
    size = round_size(run.schedule, run.pp, run.count)
    rounds = run.count // size
    few = max(4, SIMULATED // (2 * run.pp * run.vpp * size))
    if run.exact or rounds <= few:
        return simulated(run, run.count, size, times, hop)
    rest = run.count - rounds * size
    longer = simulated(run, few * size + rest, size, times, hop)
    shorter = simulated(run, (few - 1) * size + rest, size, times, hop)
    more = rounds - few
    busy = [longer["busy"][rank] + more * (longer["busy"][rank] - shorter["busy"][rank]) for rank in range(run.pp)]
    end = longer["end"] + more * (longer["end"] - shorter["end"])
    return {"end": end, "busy": busy, "orders": longer["orders"], "starts": longer["starts"]}


def data_parallel_seconds(s: object, run: object, y: object, stages: list) -> float:
    """Seconds to reduce a rank's gradients and to gather its weights, per step, nothing hidden."""
    dense = 0
    expert = 0
    for stage in stages:
        elements = stage_parameters(s, run, stage)
        dense += elements[0]
        expert += elements[1]
    span = run.gpus / run.pp
    # fp32 gradients are scattered, bf16 weights gathered.
    dense_ranks = run.dp * run.cp
    total = ring(dense * 6, dense_ranks, link(y, span), y.latency)
    return total + ring(expert * 6, run.edp, link(y, span), y.latency)


def optimizer_seconds(s: object, run: object, y: object, stages: list) -> float:
    """Seconds of the update: gradient and state read, state and weight written; what is away travels twice."""
    elements = 0
    for stage in stages:
        pair = stage_parameters(s, run, stage)
        elements += pair[0] / run.dense_share + pair[1] / run.expert_share
    # A master that is the parameter itself is read and written, too.
    rest = 3 * run.parameter_bytes if run.engine == "titan" else 4 + 2
    total = elements * (rest + 2 * run.state_bytes) / (y.memory_bandwidth * y.memory_efficiency)
    return total + elements * 2 * run.state_away / y.host_bandwidth


def offload_seconds(s: object, run: object, y: object, stage: object, compute: float) -> float:
    """Seconds of one pass through a stage in which the copies to the host are not hidden."""
    moved = 0
    for layer in stage.layers:
        moved += bytes_with(layer_rows(s, run, layer < s.num_dense), run, "offloaded")
    return max(0, moved / y.host_bandwidth - compute)


def predict(s: object, run: object, y: object) -> dict:
    """Everything about one run: see ``docs/planner.md`` for the keys."""
    ranks = [rank_memory(s, run, rank) for rank in range(run.pp)]
    worst = 0
    for rank in range(run.pp):
        if ranks[rank]["total"] > ranks[worst]["total"]:
            worst = rank
    memory = report_memory(s, run) if run.rank_rule == "report" else ranks[worst]
    limit = limit_gib(y)
    passes = stage_times(s, run, y)
    times = [[], [], [], []]
    for i in range(len(passes)):
        stage = passes[i]
        forward = total_of(stage["forward"])
        back = total_of(stage["input"])
        weight = total_of(stage["weight"])
        if len(run.offload) > 0:
            stage["forward"]["offload"] = offload_seconds(s, run, y, run.stages[i], forward)
            stage["input"]["offload"] = offload_seconds(s, run, y, run.stages[i], back + weight)
            forward += stage["forward"]["offload"]
            back += stage["input"]["offload"]
        times[0].append(forward)
        times[1].append(back + weight)
        times[2].append(back)
        times[3].append(weight)
    boundary = tokens_of(run) / run.tp * s.dim * BF16
    hop = boundary / link(y, run.gpus / run.pp * 2) + y.latency if run.pp > 1 else 0
    result = pipeline(run, times, hop)
    busiest = 0
    worked = 0
    for rank in range(run.pp):
        worked += result["busy"][rank] / run.pp
        if result["busy"][rank] > result["busy"][busiest]:
            busiest = rank
    ran = result["end"] * run.passes
    mine = [run.stages[i] for i in held_stages(run, busiest)]
    reduce = data_parallel_seconds(s, run, y, mine)
    last = 0
    layers = 0
    for i in held_stages(run, busiest):
        last += times[1][i]
        layers += len(run.stages[i].layers) + len(run.stages[i].mtp)
    # Gradients travel behind the last backward pass, weights behind the first forward one; one layer's cannot hide.
    exposed = max(reduce - last, reduce / max(1, layers))
    update = optimizer_seconds(s, run, y, mine)
    step = ran + exposed + update
    parts = {}
    for i in held_stages(run, busiest):
        for phase in passes[i]:
            add(parts, passes[i][phase], run.count * run.passes)
    parts["bubble"] = ran - result["busy"][busiest] * run.passes
    parts["data parallel"] = exposed
    parts["optimizer"] = update
    tokens = run.gbs * run.seq / run.gpus
    flops = training_flops(s, run.seq, run.causal, run.lengths)
    send = exchange(s, run, y) if s.num_dense < s.num_layers else 0
    return {
        "params_total": parameters(s),
        "params_active": active_parameters(s),
        "flops_per_token": flops,
        "memory_gib": {
            "weights": memory["weights"],
            "gradients": memory["gradients"],
            "optimizer": memory["optimizer"],
            "activations": memory["activations"],
            "buffers": memory["buffers"],
            "total": memory["total"],
        },
        "limit_gib": limit,
        "rank": worst,
        "fits": ranks[worst]["total"] <= limit,
        "ranks": ranks,
        "step_time_s": step,
        "tflops_per_gpu": flops * tokens / step / 1e12,
        "tokens_per_s_per_gpu": tokens / step,
        "bubble_fraction": 1 - worked / result["end"],
        "a2a_us": {"dispatch": send * 1e6, "combine": send * 1e6},
        "time_s": parts,
        "times": times,
        "hop_s": hop,
        "orders": result["orders"],
        "starts": result["starts"],
    }
