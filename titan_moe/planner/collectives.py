"""Seconds of the collectives (report sections 3.1, 4.2 and Table 7).

The plain all-to-all sends every row, ``T K h 2 (EP - 1) / EP`` bytes per rank, with a bound as many as there is room
for. DeepEP and HybridEP send a token once to each rank inside an NVLink domain, and once to each node across the
network, where group-limited routing also bounds the nodes. Written in the part of Python that ``to_js`` translates.
``y`` is a ``systems.System``.
"""

from math import comb

from titan_moe.planner.rows import held_rows, tokens_of

BYTES = 2


def distinct(groups: float, choices: float) -> float:
    """How many of ``groups`` equal groups ``choices`` even draws meet on average."""
    return groups * (1 - (1 - 1 / groups) ** choices)


def distinct_nodes(nodes: int, s: object) -> float:
    """Nodes that a token's experts lie on, on average, where routing keeps ``topk_groups`` of ``groups``."""
    G = s.groups
    M = s.topk_groups
    if G <= 1 or M >= G or nodes <= 1:
        return distinct(nodes, s.top_k)
    if nodes > G:
        return nodes * M / G * (1 - (1 - G / (nodes * M)) ** s.top_k)
    # A node holds b groups; j of them are kept with the hypergeometric distribution.
    b = G // nodes
    met = 0
    for j in range(1, min(b, M) + 1):
        met += comb(b, j) * comb(G - b, M - j) / comb(G, M) * (1 - (1 - j / M) ** s.top_k)
    return nodes * met


def ring(amount: float, ranks: int, bandwidth: float, latency: float) -> float:
    """An all-gather or reduce-scatter whose whole is ``amount`` bytes."""
    if ranks == 1:
        return 0
    return amount * (ranks - 1) / ranks / bandwidth + latency


def link(y: object, span: int) -> float:
    """Bytes per second and direction between ranks that lie within ``span`` neighbours."""
    return y.nvlink * y.link_efficiency if span <= y.domain else y.network * y.link_efficiency


def exchange(s: object, run: object, y: object) -> float:
    """Seconds of one dispatch, or of one combine, of a micro-batch's layer."""
    ranks = run.ep * run.etp
    if ranks == 1:
        return 0
    tokens = tokens_of(run) / run.tp
    token = s.expert_dim * BYTES * run.imbalance
    nodes = -(-ranks // y.domain)
    apart = (ranks - 1) / ranks
    if run.dispatcher == "allgather":
        return ring(tokens * ranks * token, ranks, link(y, ranks), y.latency)
    if run.dispatcher == "alltoall":
        amount = held_rows(s, run) * s.expert_dim * BYTES
        if nodes > 1:
            return amount * (nodes - 1) / nodes / y.alltoall_network + y.network_latency
        return amount * apart / y.alltoall_nvlink + y.latency
    if nodes > 1:
        met = distinct_nodes(nodes, s)
        return tokens * token * met * (nodes - 1) / nodes / y.dedup_network + y.network_latency
    return tokens * token * distinct(ranks, s.top_k) * apart / y.dedup_nvlink + y.latency
