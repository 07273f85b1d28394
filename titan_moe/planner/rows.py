"""Rows of tokens on one rank: those its experts work on, and those it has room for.

Written in the part of Python that ``to_js`` translates.
"""


def tokens_of(run: object) -> float:
    """Tokens of one micro-batch that the ranks of one tensor-parallel group share."""
    return run.mbs * run.seq / run.cp


def routed_rows(s: object, run: object) -> float:
    """Rows that one rank's experts work on; with a load imbalance those of the busiest rank."""
    return tokens_of(run) / run.tp * s.top_k * run.etp * run.imbalance


def held_rows(s: object, run: object) -> float:
    """Rows that a rank has room for: as many as come, or with ``moe.recv_capacity_factor`` its bound.

    See ``GroupDispatcher.bound_on``: rounded up for each pair of ranks under the all-to-all, else for the rank.
    """
    if run.recv_capacity_factor == 0:
        return routed_rows(s, run)
    tokens = tokens_of(run) / run.tp
    chunk = -(-s.experts // run.ep)
    ranks = run.ep * run.etp
    pairs = ranks if run.dispatcher == "alltoall" else 1
    even = tokens * s.top_k * (ranks / pairs) * chunk / s.experts
    # What a float adds to a whole number does not make it one more.
    bound = -(-(run.recv_capacity_factor * even - 1e-6) // 1)
    return pairs * min(bound, tokens * min(s.top_k, chunk) * (ranks / pairs))
