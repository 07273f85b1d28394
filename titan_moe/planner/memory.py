"""Memory of every pipeline rank (report section 4.1): what stays for the whole run, and its fullest moment.

Static bytes per parameter under the distributed optimizer: 2 weight (bf16), 4 gradient (fp32), 4 master and 4 + 4
moments shared by d ranks, so 6 + 12 / d; d is the data-parallel size times cp for dense parameters, and the
expert-data-parallel size for experts. This project's own runs weigh what their configuration stores. Activations come
from ``activations``, and the passes in flight from the order of ``schedules``. Written in the part of Python that
``to_js`` translates.
"""

from titan_moe.models.count import (
    dense_parameters,
    expert_parameters,
    mtp_is_dense,
    mtp_joint_parameters,
    router_parameters,
)
from titan_moe.planner.activations import all_bytes, bytes_with, head_rows, layer_rows, mtp_rows
from titan_moe.planner.own_activations import own_model_rows, own_output_rows
from titan_moe.planner.parameters import stage_entries
from titan_moe.planner.rows import held_rows, tokens_of
from titan_moe.planner.schedules import folds, in_flight, keeps_all, order_of, rank_of, round_size

GIB = 1024 * 1024 * 1024
LAYERS = ["dense layer", "MoE layer"]
"""Parts of a stage that targets and whole-layer recompute reach."""


def stage_parameters(s: object, run: object, stage: object) -> list:
    """``[dense elements, expert elements]`` of one stage on one rank, its copies of the embedding included."""
    dense = 0
    moe = 0
    for layer in stage.layers:
        if layer < s.num_dense:
            dense += 1
        else:
            moe += 1
    depths = len(stage.mtp)
    if mtp_is_dense(s):
        dense += depths
    else:
        moe += depths
    table = s.vocab * s.dim / run.tp
    elements = dense * dense_parameters(s, True, run.tp) + moe * dense_parameters(s, False, run.tp)
    elements += moe * router_parameters(s) + depths * mtp_joint_parameters(s)
    if s.mtp_own:
        elements += depths * 2 * table
    if stage.embedding or (depths > 0 and not s.mtp_own):
        elements += table
    if stage.head:
        if s.mtp == 0:
            elements += s.dim
        if not s.tied or not stage.embedding:
            elements += table
    if 0 in stage.mtp:
        elements += s.dim
    return [elements, moe * s.experts / (run.ep * run.etp) * expert_parameters(s)]


def static_bytes(run: object, elements: float, share: float) -> dict:
    """Bytes of weights, gradients and optimizer of ``elements`` parameters, whose state ``share`` ranks divide."""
    state = run.state_bytes - run.state_away
    return {"weights": elements * 2, "gradients": elements * 4, "optimizer": elements * state / share}


def own_static_bytes(s: object, run: object, stage: object) -> dict:
    """The same of one stage under this project's FSDP, whose shards are master and weight in one.

    What is gathered for compute, and what is not reduced yet, stay where nothing is freed between passes.
    """
    parts = {"weights": 0, "gradients": 0, "optimizer": 0}
    for group in stage_entries(s, stage, mtp_is_dense(s)):
        for found in group[2]:
            expert = found[3] == "ep"
            share = run.expert_share if expert else run.dense_share
            elements = group[1] * found[1]
            if expert:
                elements /= run.ep * run.etp
            elif found[3] == "tp":
                elements /= run.tp
            stored = run.stored[group[0] + found[0]]
            whole = 0 if run.reshard or share == 1 else 1
            copied = share == 1 and run.compute_bytes != run.parameter_bytes and not run.reshard
            parts["weights"] += elements * (stored[0] / share + (run.compute_bytes if whole == 1 or copied else 0))
            parts["gradients"] += elements * (stored[1] / share + whole * run.parameter_bytes)
            parts["optimizer"] += elements * stored[2] / share
    return parts


def add_static(s: object, run: object, stage: object, parts: dict) -> None:
    """Add to ``parts`` what one stage holds for the whole run."""
    found = []
    if run.engine == "titan":
        found.append(own_static_bytes(s, run, stage))
    else:
        elements = stage_parameters(s, run, stage)
        found.append(static_bytes(run, elements[0], run.dense_share))
        found.append(static_bytes(run, elements[1], run.expert_share))
    for some in found:
        for name in some:
            parts[name] += some[name]


def stage_rows(s: object, run: object, stage: object) -> list:
    """Saved tensors of one pass through a stage, as ``[what, times, rows]``."""
    parts = []
    dense = 0
    moe = 0
    for layer in stage.layers:
        if layer < s.num_dense:
            dense += 1
        else:
            moe += 1
    if mtp_is_dense(s):
        dense += len(stage.mtp)
    else:
        moe += len(stage.mtp)
    if dense > 0:
        parts.append(["dense layer", dense, layer_rows(s, run, True)])
    if moe > 0:
        parts.append(["MoE layer", moe, layer_rows(s, run, False)])
    if len(stage.mtp) > 0:
        parts.append(["MTP joint", len(stage.mtp), mtp_rows(s, run)])
    if stage.head:
        parts.append(["head", 1 + s.mtp, head_rows(s, run)])
    if run.engine == "titan" and dense + moe > 0:
        parts.append(["all layers", 1, own_model_rows(s, run)])
    if run.engine == "titan" and not stage.head:
        parts.append(["stage", 1, own_output_rows(s, run)])
    return parts


def kept_bytes(s: object, run: object, stage: object) -> float:
    """Bytes that one pass through a stage keeps on the device."""
    total = 0
    for part in stage_rows(s, run, stage):
        total += part[1] * (bytes_with(part[2], run, "kept") if part[0] in LAYERS else all_bytes(part[2]))
    return total


def tail_share(s: object, run: object) -> float:
    """Share of a MoE layer's saved bytes that a split backward pass keeps for the gradients of weights."""
    rows = layer_rows(s, run, False)
    linear = 0
    for saved in rows:
        if "weight gradient" in saved["why"]:
            linear += saved["bytes"]
    return linear / max(all_bytes(rows), 1)


def buffer_rows(s: object, run: object, stages: list) -> list:
    """``[name, bytes]`` of what comes and goes within a pass: none of it depends on the micro-batches in flight."""
    T = tokens_of(run)
    t = T / run.tp
    rows = []
    moe = s.num_dense < s.num_layers
    if moe and run.memory_efficient_permutation:
        # Where it is not kept for the gradient of the routing weights, it still exists until it is combined.
        rows.append(["experts' output", held_rows(s, run) * s.expert_dim * 2])
    if run.ep_overlap and moe:
        rows.append(["overlapped micro-batch", bytes_with(layer_rows(s, run, False), run, "kept")])
    if run.tp > 1:
        rows.append(["sequence gather", T * s.dim * 2])
    if run.pp > 1:
        rows.append(["stage boundary", 2 * t * s.dim * 2])
    redone = max(
        bytes_with(layer_rows(s, run, False), run, "recomputed") if moe else 0,
        bytes_with(layer_rows(s, run, True), run, "recomputed") if s.num_dense > 0 else 0,
    )
    if redone > 0:
        rows.append(["recompute workspace", redone])
    moved = bytes_with(layer_rows(s, run, False), run, "offloaded") if moe else 0
    if moved > 0:
        rows.append(["offload staging", 2 * moved])
    if run.cuda_graph:
        # Inputs and outputs of the captured parts, which no other tensor may reuse.
        layers = 0
        for stage in stages:
            layers += len(stage.layers) + len(stage.mtp)
        rows.append(["graph buffers", 4 * t * s.dim * 2 * layers])
    if run.engine == "titan" and run.reshard:
        dense = dense_parameters(s, False, run.tp) + router_parameters(s)
        expert = s.experts / (run.ep * run.etp) * expert_parameters(s)
        # This block's parameters, the next one's, and this block's gradients before they are reduced.
        rows.append(["all-gather", 2 * run.compute_bytes * (dense + expert)])
        rows.append(["gradients to reduce", run.parameter_bytes * (dense + expert)])
    return rows


def limit_gib(y: object) -> float:
    """GiB of a device that a run may fill: less what libraries hold, and what the allocator loses to gaps."""
    return y.memory_gib * (1 - y.slack) - y.reserved_gib


def held_stages(run: object, rank: int) -> list:
    """Indices of the stages of a pipeline rank."""
    return [i for i in range(run.pp * run.vpp) if rank_of(i, run.pp, folds(run.schedule)) == rank]


def passes_in_flight(s: object, run: object, rank: int) -> list:
    """``[passes, tails]`` of each stage at the rank's fullest moment; tails wait for their weight gradients."""
    stages = run.pp * run.vpp
    if run.pp == 1:
        return [[1], [0]]
    if keeps_all(run.schedule):
        return [[run.count for i in range(stages)], [0 for i in range(stages)]]
    # A few rounds show the fullest moment; more of them only repeat it.
    size = round_size(run.schedule, run.pp, run.count)
    order = order_of(run.schedule, rank, run.pp, run.vpp, min(run.count, 4 * size), size)
    held = [kept_bytes(s, run, stage) for stage in run.stages]
    share = tail_share(s, run)
    return in_flight(order, stages, held, [x * share for x in held])


def rank_memory(s: object, run: object, rank: int) -> dict:
    """GiB of one pipeline rank by component, the passes in flight of each of its stages, and its buffers."""
    parts = {"weights": 0, "gradients": 0, "optimizer": 0}
    mine = held_stages(run, rank)
    for i in mine:
        add_static(s, run, run.stages[i], parts)
    flight = passes_in_flight(s, run, rank)
    share = tail_share(s, run)
    activations = 0
    for i in mine:
        activations += (flight[0][i] + flight[1][i] * share) * kept_bytes(s, run, run.stages[i])
    buffers = buffer_rows(s, run, [run.stages[i] for i in mine])
    buffered = 0
    for entry in buffers:
        buffered += entry[1]
    total = parts["weights"] + parts["gradients"] + parts["optimizer"] + activations + buffered
    return {
        "weights": parts["weights"] / GIB,
        "gradients": parts["gradients"] / GIB,
        "optimizer": parts["optimizer"] / GIB,
        "activations": activations / GIB,
        "buffers": buffered / GIB,
        "total": total / GIB,
        "stages": mine,
        "passes": [flight[0][i] for i in mine],
        "buffer_rows": buffers,
    }


def report_memory(s: object, run: object) -> dict:
    """The rank of the report's Table 3: its own rule, which is not that of any real rank.

    An even share of MoE layers without router, embedding, head and dense layers, and
    ``L_r (PP - 1) + (L_r / VPP) (PP - 1)`` layers times micro-batches in flight.
    """
    layers = (s.num_layers + s.mtp) // run.pp
    layers = layers + 1 if layers * run.pp < s.num_layers + s.mtp else layers
    dense = layers * dense_parameters(s, False, run.tp)
    expert = layers * s.experts / (run.ep * run.etp) * expert_parameters(s)
    parts = static_bytes(run, dense, run.dense_share)
    more = static_bytes(run, expert, run.expert_share)
    passes = layers * (run.pp - 1) + layers / run.vpp * (run.pp - 1)
    activations = max(passes, layers) * bytes_with(layer_rows(s, run, False), run, "kept")
    weights = parts["weights"] + more["weights"]
    gradients = parts["gradients"] + more["gradients"]
    optimizer = parts["optimizer"] + more["optimizer"]
    return {
        "weights": weights / GIB,
        "gradients": gradients / GIB,
        "optimizer": optimizer / GIB,
        "activations": activations / GIB,
        "buffers": 0,
        "total": (weights + gradients + optimizer + activations) / GIB,
        "stages": [],
        "passes": [passes],
        "buffer_rows": [],
    }
