"""The router's kernels: choice, weights and sums of the losses in one pass, all their gradients in another.

Columns are experts in groups that are padded to powers of two: column c is expert ``c // EG2 * EG + c % EG2``, so
that a group is a slice of a reshape. Column order is expert order, so ties by column are ties by expert. Programs
walk over the tokens of a block, of one sequence, in steps of BT.
"""

from titan_moe.kernels.language import rounded, tl, triton


@triton.jit
def _log1p(y):
    """log(1 + y) for y >= 0 to a few units in the last place, also where 1 + y rounds to 1."""
    u = 1 + y
    return tl.where(u == 1, y, tl.log(u) * (y / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def _softplus(l):
    return tl.where(l > 0, l, 0.0) + _log1p(tl.exp(-tl.abs(l)))


@triton.jit
def _score(l, SCORE: tl.constexpr, TINY: tl.constexpr):
    """Sigmoid or sqrt-softplus of each logit."""
    if SCORE == "sigmoid":
        return 1 / (1 + tl.exp(-l))
    s = _softplus(l)
    return tl.sqrt(tl.where(s < TINY, TINY, s))


@triton.jit
def _score_slope(l, v, SCORE: tl.constexpr, TINY: tl.constexpr):
    """Derivative of ``_score``, whose value is v."""
    if SCORE == "sigmoid":
        return v * (1 - v)
    return tl.where(_softplus(l) < TINY, 0.0, 0.5 / (1 + tl.exp(-l)) / v)


@triton.jit
def _finite_or_lowest(x, LOWEST: tl.constexpr):
    """NaN and infinities rank below every finite value."""
    return tl.where((x == x) & (tl.abs(x) < float("inf")), x, LOWEST)


@triton.jit
def _kept_groups(
    key, real, GROUPS: tl.constexpr, KEEP: tl.constexpr, GROUP_K: tl.constexpr, LOWEST: tl.constexpr, EG2: tl.constexpr
):
    """Bool ``[BT, E2]``: experts of each token's best groups, by the sum of a group's best scores."""
    BT: tl.constexpr = key.shape[0]
    G2: tl.constexpr = key.shape[1] // EG2
    nan = tl.max(tl.reshape((key != key).to(tl.int32), [BT, G2, EG2]), 2) > 0
    members = tl.reshape(tl.where(real & (key == key), key, float("-inf")), [BT, G2, EG2])
    j = tl.arange(0, EG2)[None, None, :]
    total = tl.zeros([BT, G2], key.dtype)
    for _ in tl.static_range(GROUP_K):
        best = tl.max(members, 2)
        total += best
        at = tl.min(tl.where(members == best[:, :, None], j, EG2), 2)
        members = tl.where(j == at[:, :, None], float("-inf"), members)
    g = tl.arange(0, G2)[None, :]
    total = tl.where(nan, LOWEST, _finite_or_lowest(total, LOWEST))
    total = tl.where(g < GROUPS, total, float("-inf"))
    kept = tl.zeros([BT, G2], tl.int1)
    for _ in tl.static_range(KEEP):
        best = tl.max(total, 1)
        at = tl.min(tl.where(total == best[:, None], g, G2), 1)
        kept = kept | (g == at[:, None])
        total = tl.where(g == at[:, None], float("-inf"), total)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], [BT, G2, EG2]), [BT, G2 * EG2])


@triton.jit
def router_kernel(
    logits,
    bias,
    valid,
    ids,
    weights,
    counts,
    probs,
    plain,
    squares,
    S,
    blocks_per_sequence,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP_K: tl.constexpr,
    ZERO_MASK: tl.constexpr,
    LOSSES: tl.constexpr,
    LOWEST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    K2: tl.constexpr,
    PADDED: tl.constexpr,
    EG2: tl.constexpr,
    E2: tl.constexpr,
):
    ACC: tl.constexpr = logits.dtype.element_ty
    RESHAPED: tl.constexpr = HAS_BIAS or GROUPS > 1
    pid = tl.program_id(0)
    first = (pid // blocks_per_sequence) * S + (pid % blocks_per_sequence) * BLOCK
    last = tl.minimum(first + BLOCK, (pid // blocks_per_sequence + 1) * S)
    c = tl.arange(0, E2)
    if PADDED:
        EG = E // GROUPS
        real = (c % EG2 < EG) & (c // EG2 < GROUPS)
        e = tl.where(real, c // EG2 * EG + c % EG2, 0)
    else:  # seen to be contiguous
        real = c < E
        e = c
    k2 = tl.arange(0, K2)
    taken = tl.zeros([E2], tl.int32)
    taken_plain = tl.zeros([E2], tl.int32)
    prob_sum = tl.zeros([E2], ACC)
    square_sum = tl.zeros([BT], ACC)
    for t0 in range(0, BLOCK, BT):
        t = first + t0 + tl.arange(0, BT)
        counted = t < last
        at = t.to(tl.int64)
        l = tl.load(logits + at[:, None] * E + e[None, :], counted[:, None] & real[None, :], other=float("-inf"))
        nan = tl.sum(((l != l) & real[None, :]).to(tl.int32), 1) > 0
        top = tl.max(tl.where(l == l, l, float("-inf")), 1)
        finite = (nan == 0) & (tl.abs(top) < float("inf"))
        # Rows past the block, and those without a finite maximum, must not spoil the arithmetic of others.
        safe = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        exps = tl.exp(l - safe[:, None])
        total = tl.sum(exps, 1)
        if SCORE == "softmax":
            s = exps / total[:, None]
        else:
            s = tl.where(real[None, :], _score(l, SCORE, TINY), 0.0)
        if SCORE == "softmax" and NORMALIZE and not RESHAPED:
            key = l
        else:
            # One NaN logit makes a whole softmax row NaN; the logits still tell the finite experts.
            key = tl.where(finite[:, None], s, l)
        if HAS_BIAS:
            key += tl.load(bias + e, real, other=0.0).to(ACC)[None, :]
        if GROUPS > 1:
            kept = _kept_groups(key, real[None, :], GROUPS, KEEP, GROUP_K, LOWEST, EG2)
            if ZERO_MASK:
                key = tl.where(kept, key, 0.0)
            else:
                key = tl.where(kept, key, float("-inf"))
        key = tl.where(real[None, :], _finite_or_lowest(key, LOWEST), float("-inf"))
        if SCORE == "softmax" and NORMALIZE:
            value = l
        else:
            value = s
        chosen_e = tl.zeros([BT, K2], tl.int32)
        chosen_v = tl.full([BT, K2], float("-inf"), ACC)
        for k in range(K):
            best = tl.max(key, 1)
            pick = tl.min(tl.where(key == best[:, None], c[None, :], E2), 1)
            hit = c[None, :] == pick[:, None]
            here = k2[None, :] == k
            chosen_e = tl.where(here, tl.sum(tl.where(hit, e[None, :], 0), 1)[:, None], chosen_e)
            chosen_v = tl.where(here, tl.sum(tl.where(hit, value, 0.0), 1)[:, None], chosen_v)
            key = tl.where(hit, float("-inf"), key)
        in_k = (k2 < K)[None, :]
        if SCORE == "softmax" and NORMALIZE:
            most = tl.max(tl.where(chosen_v == chosen_v, chosen_v, float("-inf")), 1)
            w = tl.exp(chosen_v - most[:, None])
            w = w / tl.sum(tl.where(in_k, w, 0.0), 1)[:, None]
        else:
            w = tl.where(in_k, chosen_v, 0.0)
            if NORMALIZE and K > 1:
                w = w / (tl.sum(w, 1) + 1e-20)[:, None]
        w = tl.where(finite[:, None], w * SCALE, float("nan"))
        if HAS_VALID:
            is_valid = tl.load(valid + at, counted, other=0) != 0
            chosen_e = tl.where(is_valid[:, None], chosen_e, -1)
            w = tl.where(is_valid[:, None], w, 0.0)
            counted = counted & is_valid
        slot = at[:, None] * K + k2[None, :]
        stored = (t < last)[:, None] & in_k
        tl.store(ids + slot, chosen_e, stored)
        tl.store(weights + slot, w, stored)
        # A real expert's key is at least LOWEST until it is taken.
        taken += tl.sum((counted[:, None] & real[None, :] & (key == float("-inf"))).to(tl.int32), 0)
        if LOSSES:
            if SCORE == "softmax":
                p = s
            else:
                p = s / (tl.sum(s, 1) + 1e-20)[:, None]
            prob_sum += tl.sum(tl.where(counted[:, None], p, 0.0), 0)
            lse = top + tl.log(total)
            square_sum += tl.where(counted, lse * lse, 0.0)
            if RESHAPED:
                key = tl.where(real[None, :], _finite_or_lowest(s, LOWEST), float("-inf"))
                for _ in range(K):
                    best = tl.max(key, 1)
                    pick = tl.min(tl.where(key == best[:, None], c[None, :], E2), 1)
                    key = tl.where(c[None, :] == pick[:, None], float("-inf"), key)
                taken_plain += tl.sum((counted[:, None] & real[None, :] & (key == float("-inf"))).to(tl.int32), 0)
    row = pid.to(tl.int64) * E + e
    tl.store(counts + row, taken, real)
    if LOSSES:
        tl.store(probs + row, prob_sum, real)
        tl.store(squares + pid, tl.sum(square_sum, 0))
        if RESHAPED:
            tl.store(plain + row, taken_plain, real)


@triton.jit
def router_backward_kernel(
    logits,
    ids,
    dweights,
    dprobs,
    dsquares,
    dlogits,
    S,
    blocks_per_sequence,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    LOSSES: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    K2: tl.constexpr,
    E2: tl.constexpr,
):
    ACC: tl.constexpr = logits.dtype.element_ty
    pid = tl.program_id(0)
    sequence = pid // blocks_per_sequence
    first = sequence * S + (pid % blocks_per_sequence) * BLOCK
    last = tl.minimum(first + BLOCK, (sequence + 1) * S)
    e = tl.arange(0, E2)
    real = e < E
    k2 = tl.arange(0, K2)
    for t0 in range(0, BLOCK, BT):
        t = first + t0 + tl.arange(0, BT)
        at = t.to(tl.int64)
        inside = (t < last)[:, None] & real[None, :]
        l = tl.load(logits + at[:, None] * E + e[None, :], inside, other=float("-inf"))
        slot = at[:, None] * K + k2[None, :]
        in_k = (t < last)[:, None] & (k2 < K)[None, :]
        id_k = tl.load(ids + slot, in_k, other=-1)
        in_k = in_k & (id_k >= 0)
        dv = tl.load(dweights + slot, in_k, other=0.0).to(ACC) * SCALE
        l_k = tl.load(logits + at[:, None] * E + id_k, in_k, other=0.0)
        # Gradient of the weights' values: of the chosen logits, scores or probabilities.
        if SCORE == "softmax":
            if NORMALIZE:
                most = tl.max(tl.where(in_k & (l_k == l_k), l_k, float("-inf")), 1)
                p = tl.where(in_k, tl.exp(l_k - most[:, None]), 0.0)
                p = p / tl.sum(p, 1)[:, None]
                dv = tl.where(in_k, p * (dv - tl.sum(p * dv, 1)[:, None]), 0.0)
        else:
            v = tl.where(in_k, _score(l_k, SCORE, TINY), 0.0)
            if NORMALIZE and K > 1:
                total_k = tl.sum(v, 1) + 1e-20
                dv = (dv - (tl.sum(v * dv, 1) / total_k)[:, None]) / total_k[:, None]
            dv = tl.where(in_k, dv * _score_slope(l_k, v, SCORE, TINY), 0.0)
        spread = tl.zeros([BT, E2], ACC)
        for k in range(K):
            here = k2[None, :] == k
            target = tl.sum(tl.where(here, id_k, 0), 1)
            amount = tl.sum(tl.where(here, dv, 0.0), 1)
            spread += tl.where(e[None, :] == target[:, None], amount[:, None], 0.0)
        # Invalid tokens have no expert and no loss.
        counted = (tl.sum(in_k.to(tl.int32), 1) > 0)[:, None]
        if LOSSES or (SCORE == "softmax" and not NORMALIZE):
            top = tl.max(tl.where(l == l, l, float("-inf")), 1)
            top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            exps = tl.exp(l - top[:, None])
            total = tl.sum(exps, 1)
            soft = exps / total[:, None]
        if LOSSES:
            g = tl.where(counted, tl.load(dprobs + sequence * E + e, real, other=0.0).to(ACC)[None, :], 0.0)
        if SCORE == "softmax" and not NORMALIZE:
            if LOSSES:
                spread += g
            spread = soft * (spread - tl.sum(soft * spread, 1)[:, None])
        elif LOSSES:
            if SCORE == "softmax":
                spread += soft * (g - tl.sum(soft * g, 1)[:, None])
            else:
                s = tl.where(real[None, :], _score(l, SCORE, TINY), 0.0)
                total_s = (tl.sum(s, 1) + 1e-20)[:, None]
                dp = (g - tl.sum(g * s, 1)[:, None] / total_s) / total_s
                spread += tl.where(inside, dp * _score_slope(l, s, SCORE, TINY), 0.0)
        if LOSSES:
            square = 2 * tl.load(dsquares).to(ACC) * (top + tl.log(total))
            spread += tl.where(counted & real[None, :], square[:, None] * soft, 0.0)
        tl.store(dlogits + at[:, None] * E + e[None, :], rounded(spread, dlogits.dtype.element_ty), inside)
