"""A run from plain choices, for the page: the same checks and numbers as ``run.plan_of`` makes, which tests hold equal.

Written in the part of Python that ``to_js`` translates. ``c`` holds the choices, one per option of the command.
"""

from titan_moe.planner.schedules import in_rounds, round_size


def even_stages(s: object, pp: int, vpp: int) -> list:
    """The default layout: layers spread evenly, earlier stages first; the head counts as one layer."""
    stages = pp * vpp
    units = s.num_layers + s.mtp + 1
    out = []
    at = 0
    for i in range(stages):
        size = units // stages + (1 if i < units % stages else 0)
        stage = {"embedding": i == 0, "layers": [], "mtp": [], "head": False}
        for unit in range(at, at + size):
            if unit < s.num_layers:
                stage["layers"].append(unit)
            elif unit < s.num_layers + s.mtp:
                stage["mtp"].append(unit - s.num_layers)
            else:
                stage["head"] = True
        at += size
        out.append(stage)
    return out


def pieces_leave_none(size: int, parts: int) -> bool:
    """Whether ``parts`` ranks each get something of ``size``."""
    piece = -(-size // parts)
    return piece * (parts - 1) < size


def refusal(s: object, y: object, c: object) -> str:
    """Why the choices cannot run, in a few words; empty where they can. The command says it at length."""
    if c.gpus % c.pp > 0:
        return "PP does not divide the GPUs"
    stage = c.gpus // c.pp
    if stage % (c.tp * c.cp) > 0:
        return "TP x CP does not divide the GPUs of a stage"
    if stage % (c.ep * c.etp) > 0:
        return "EP x ETP does not divide the GPUs of a stage"
    if s.heads % c.tp > 0 or s.kv_heads % c.tp > 0:
        return "TP does not divide the heads"
    if not pieces_leave_none(s.vocab, c.tp):
        return "TP is more than the vocabulary"
    if s.num_dense > 0 and not pieces_leave_none(s.ffn, c.tp):
        return "TP leaves ranks without a part of the dense feed-forward"
    if s.shared_hidden > 0 and not pieces_leave_none(s.shared_hidden, c.tp):
        return "TP leaves ranks without a part of the shared expert"
    if not pieces_leave_none(s.expert_hidden, c.etp):
        return "ETP leaves ranks without a part of an expert"
    if not pieces_leave_none(s.experts, c.ep):
        return "EP leaves ranks without experts"
    if c.recv_capacity_factor > 0 and c.ep * c.etp == 1:
        return "a bound on received rows needs EP or ETP"
    if c.recv_capacity_factor > 0 and c.seq // c.cp % c.tp > 0:
        return "a bound on received rows needs equally many tokens on all ranks"
    if c.recv_capacity_factor > 0 and c.imbalance > c.recv_capacity_factor:
        return "the busiest rank gets more rows than the bound"
    if c.cp > 1 and c.seq % (2 * c.cp) > 0:
        return "the sequence does not divide into 2 x CP chunks"
    dp = stage // (c.tp * c.cp)
    if c.gbs % dp > 0:
        return "DP does not divide the global batch"
    local = c.gbs // dp
    if local % c.mbs > 0:
        return "the micro-batch does not divide a rank's part of the global batch"
    if c.pp == 1 and c.vpp > 1:
        return "VPP needs PP"
    if c.pp * c.vpp > s.num_layers + s.mtp + 1:
        return "more stages than layers"
    if c.precision == "nvfp4" and y.peak_fp4 == 0:
        return "the system has no FP4"
    if c.precision != "bf16" and y.peak_fp8 == 0:
        return "the system has no FP8"
    if "mla_up_proj" in c.recompute and not s.latent:
        return "the model has no latent attention to recompute"
    if "mlp" in c.recompute and s.num_dense == 0:
        return "the model has no dense feed-forward to recompute"
    return pipeline_refusal(s, c, local // c.mbs) if c.pp > 1 else ""


def pipeline_refusal(s: object, c: object, count: int) -> str:
    """Why ``count`` micro-batches cannot run under the schedule."""
    if (c.schedule == "1F1B" or c.schedule == "GPipe") and c.vpp != 1:
        return "the schedule has one stage per rank"
    if (c.schedule == "ZBVZeroBubble" or c.schedule == "DualPipeV") and c.vpp != 2:
        return "the schedule has two stages per rank"
    if c.schedule == "1F1B" and count < c.pp:
        return "fewer micro-batches than pipeline ranks"
    if c.schedule == "DualPipeV" and count < 2 * c.pp:
        return "fewer micro-batches than twice the pipeline ranks"
    if in_rounds(c.schedule) and count % round_size(c.schedule, c.pp, count) > 0:
        return "the micro-batches do not divide into rounds"
    if c.schedule == "InterleavedZeroBubble" or c.schedule == "ZBVZeroBubble" or c.schedule == "DualPipeV":
        stages = even_stages(s, c.pp, c.vpp)
        for i in range(1, len(stages)):
            uses = 0 if s.mtp_own else len(stages[i]["mtp"])
            if uses + (1 if stages[i]["head"] and s.tied else 0) > 1:
                return "a stage uses the embedding twice, which a split backward pass cannot"
    return ""


def compose(s: object, c: object, stages: list) -> dict:
    """The numbers of a run; see ``run.Run``."""
    stage = c.gpus // c.pp
    dp = stage // (c.tp * c.cp)
    return {
        "gpus": c.gpus,
        "tp": c.tp,
        "cp": c.cp,
        "pp": c.pp,
        "vpp": c.vpp,
        "ep": c.ep,
        "etp": c.etp,
        "dp": dp,
        "edp": stage // (c.ep * c.etp),
        "mbs": c.mbs,
        "gbs": c.gbs,
        "seq": c.seq,
        "count": c.gbs // dp // c.mbs,
        "passes": 1,
        "schedule": c.schedule,
        "stages": stages,
        "precision": c.precision,
        "recompute": c.recompute,
        "offload": c.offload,
        "dispatcher": c.dispatcher,
        "ep_overlap": c.ep_overlap,
        "cuda_graph": c.cuda_graph,
        "memory_efficient_permutation": c.memory_efficient_permutation,
        "state_bytes": 12 if c.moments == "fp32" else 8,
        "state_away": (12 if c.moments == "fp32" else 8) if "optimizer" in c.offload else 0,
        "stored": {},
        "dense_share": dp * c.cp,
        "expert_share": stage // (c.ep * c.etp),
        "imbalance": c.imbalance,
        "causal": c.causal,
        "lengths": c.lengths,
        "rank_rule": c.rank_rule,
        "engine": "megatron",
        "device": "cuda",
        "reshard": False,
        "parameter_bytes": 4,
        "compute_bytes": 2,
        "sequence_parallel": True,
        "cp_method": "allgather",
        "offload_fraction": 1,
        "offload_least": 0,
        "moe_save": c.moe_save,
        "recv_capacity_factor": c.recv_capacity_factor,
        "document_mask": False,
        "exact": False,
    }
