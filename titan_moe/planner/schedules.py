"""What every pipeline rank does, in order, under each schedule, and what it keeps for the way back.

The orders are those of ``torch.distributed.pipelining``, which the trainer runs; a test holds them equal. Written in
the part of Python that ``to_js`` translates.

An operation is ``[kind, stage, micro-batch]``. A split backward pass computes gradients of inputs and of weights at
different times (zero bubble, arXiv 2401.10241; DualPipe, arXiv 2412.19437 section 3.2.1).
"""

FORWARD = 0
BACKWARD = 1
INPUT = 2
WEIGHT = 3


def in_rounds(schedule: str) -> bool:
    """Whether the schedule takes its micro-batches in rounds of equal size."""
    return schedule == "Interleaved1F1B" or schedule == "InterleavedZeroBubble"


def round_size(schedule: str, pp: int, count: int) -> int:
    """Micro-batches after which the order of operations repeats."""
    return count // max(1, count // pp) if in_rounds(schedule) else pp


def interleaved_order(rank: int, pp: int, vpp: int, count: int, size: int, hops: int, split: bool) -> list:
    """Rounds of ``size`` micro-batches through all chunks of the rank.

    Args:
        hops: forward passes of warm-up for every rank that lies behind this one: 2 where each backward pass has to
            come back through the whole round, 1 for plain 1F1B and for the split backward pass.
    """
    total = vpp * count
    warmup = min((vpp - 1) * size + hops * (pp - 1 - rank), total)
    ops = []
    passed = [0 for chunk in range(vpp)]
    returned = [0 for chunk in range(vpp)]
    waiting = []
    taken = 0
    for step in range(total + warmup):
        if step < total:
            chunk = (step // size) % vpp
            ops.append([FORWARD, chunk * pp + rank, passed[chunk]])
            passed[chunk] += 1
        if step >= warmup:
            chunk = vpp - 1 - ((step - warmup) // size) % vpp
            stage = chunk * pp + rank
            ops.append([INPUT if split else BACKWARD, stage, returned[chunk]])
            if split:
                waiting.append([WEIGHT, stage, returned[chunk]])
                if step - warmup >= rank:
                    ops.append(waiting[taken])
                    taken += 1
            returned[chunk] += 1
    while taken < len(waiting):
        ops.append(waiting[taken])
        taken += 1
    return ops


def breadth_first_order(rank: int, pp: int, vpp: int, count: int, reverse: bool) -> list:
    """All micro-batches through one chunk, then the next; all forward passes before the first backward pass."""
    ops = []
    for chunk in range(vpp):
        ops.extend([[FORWARD, chunk * pp + rank, m] for m in range(count)])
    for chunk in range(vpp):
        stage = (vpp - 1 - chunk) * pp + rank
        ops.extend([[BACKWARD, stage, count - 1 - m if reverse else m] for m in range(count)])
    return ops


def zero_bubble_v_order(rank: int, pp: int, count: int) -> list:
    """ZB-V (arXiv 2401.10241, section 6): rank r holds stages r and ``2 * pp - 1 - r``."""
    first = rank
    second = 2 * pp - 1 - rank
    most = max(2 * pp - 1, count)
    ops = []
    f0 = 0
    f1 = 0
    b0 = 0
    b1 = 0
    for _ in range(2 * (pp - rank) - 1):
        ops.append([FORWARD, first, f0])
        f0 += 1
    for _ in range(rank):
        ops.append([FORWARD, second, f1])
        f1 += 1
        ops.append([FORWARD, first, f0])
        f0 += 1
    for _ in range(pp - rank):
        ops.append([FORWARD, second, f1])
        f1 += 1
        ops.append([INPUT, second, b1])
        ops.append([WEIGHT, second, b1])
        b1 += 1
    while f1 < f0 or f0 < most:
        if f0 < most:
            ops.append([FORWARD, first, f0])
            f0 += 1
        ops.append([INPUT, first, b0])
        ops.append([WEIGHT, first, b0])
        b0 += 1
        ops.append([FORWARD, second, f1])
        f1 += 1
        ops.append([INPUT, second, b1])
        ops.append([WEIGHT, second, b1])
        b1 += 1
    w0 = b0
    w1 = b1
    for _ in range(rank):
        ops.append([INPUT, first, b0])
        b0 += 1
        ops.append([INPUT, second, b1])
        b1 += 1
    for _ in range(pp - rank):
        ops.append([INPUT, first, b0])
        b0 += 1
        ops.append([WEIGHT, first, w0])
        w0 += 1
    while w1 < b1:
        ops.append([WEIGHT, second, w1])
        w1 += 1
    while w0 < b0:
        ops.append([WEIGHT, first, w0])
        w0 += 1
    return [op for op in ops if op[2] < count]


def dual_pipe_v_order(rank: int, pp: int, count: int) -> list:
    """DualPipeV: both directions of DualPipe folded onto one half of the ranks; phases as DualPipe numbers them."""
    first = rank
    second = 2 * pp - 1 - rank
    behind = pp - 1 - rank
    ops = []
    waiting = []
    taken = 0
    f = [0, 0]
    b = [0, 0]
    stages = [first, second]
    # Each phase is a pattern, repeated: a capital is an operation, the digit after it the chunk.
    split = False
    half = rank + 1
    phases = [
        [2 * behind, "F0"],
        [rank + 1, "F0F1"],
        [behind, "I1W.F1"],
        [count - 2 * pp + rank + 1, "F0B1F1B0"],
        [behind, "B1F1B0"],
    ]
    for i in range(half):
        # From the middle on the backward passes are split, so that the others need not wait for weight gradients.
        middle = half // 2
        late = i > middle or (i == middle and rank % 2 == 1)
        phases.append([1, "I1" if late else "B1"])
        split = late or i == middle
        phases.append([1, "I0" if split else "B0"])
    phases.append([behind, "W.I0" if split else "W.B0"])
    phases.append([rank + 1, "W."])
    for phase in phases:
        pattern = phase[1]
        for _ in range(phase[0]):
            for at in range(len(pattern) // 2):
                kind = pattern[2 * at]
                chunk = 1 if pattern[2 * at + 1] == "1" else 0
                if kind == "F":
                    ops.append([FORWARD, stages[chunk], f[chunk]])
                    f[chunk] += 1
                elif kind == "W":
                    if taken < len(waiting):
                        ops.append(waiting[taken])
                        taken += 1
                else:
                    ops.append([BACKWARD if kind == "B" else INPUT, stages[chunk], b[chunk]])
                    if kind == "I":
                        waiting.append([WEIGHT, stages[chunk], b[chunk]])
                    b[chunk] += 1
    return ops


def order_of(schedule: str, rank: int, pp: int, vpp: int, count: int, size: int) -> list:
    """What pipeline rank ``rank`` does in one step of ``count`` micro-batches, in rounds of ``size``."""
    if schedule == "1F1B":
        return interleaved_order(rank, pp, 1, count, count, 1, False)
    if schedule == "Interleaved1F1B":
        return interleaved_order(rank, pp, vpp, count, size, 2, False)
    if schedule == "InterleavedZeroBubble":
        return interleaved_order(rank, pp, vpp, count, size, 1, True)
    if schedule == "ZBVZeroBubble":
        return zero_bubble_v_order(rank, pp, count)
    if schedule == "DualPipeV":
        return dual_pipe_v_order(rank, pp, count)
    return breadth_first_order(rank, pp, vpp, count, schedule == "LoopedBFS")


def folds(schedule: str) -> bool:
    """Whether rank r holds stages r and ``2 * pp - 1 - r``."""
    return schedule == "ZBVZeroBubble" or schedule == "DualPipeV"


def rank_of(stage: int, pp: int, folded: bool) -> int:
    """The pipeline rank that holds ``stage``."""
    place = stage % pp
    return pp - 1 - place if folded and (stage // pp) % 2 == 1 else place


def keeps_all(schedule: str) -> bool:
    """Whether all micro-batches are in flight at once."""
    return schedule == "GPipe" or schedule == "LoopedBFS"


def in_flight(order: list, stages: int, held: list, tail: list) -> list:
    """Passes of each stage that a rank keeps at its fullest moment.

    Args:
        order: the rank's operations.
        stages: stages of the whole pipeline.
        held: bytes that one pass through each stage keeps.
        tail: bytes of those that stay until the gradients of weights are there, where the backward pass is split.

    Returns:
        ``[passes of each stage, tails of each stage]``.
    """
    level = 0
    peak = -1
    passes = [0 for stage in range(stages)]
    tails = [0 for stage in range(stages)]
    best = [[0 for stage in range(stages)], [0 for stage in range(stages)]]
    for op in order:
        stage = op[1]
        if op[0] == FORWARD:
            level += held[stage]
            passes[stage] += 1
            if level > peak:
                peak = level
                best = [list(passes), list(tails)]
        elif op[0] == BACKWARD:
            level -= held[stage]
            passes[stage] -= 1
        elif op[0] == INPUT:
            level -= held[stage] - tail[stage]
            passes[stage] -= 1
            tails[stage] += 1
        else:
            level -= tail[stage]
            tails[stage] -= 1
    return best


def simulate(orders: list, stages: int, ranks: list, times: list, hop: float) -> dict:
    """Run the operations, each as soon as its rank is free and what it needs has arrived.

    Args:
        orders: operations of each rank.
        stages: stages of the whole pipeline.
        ranks: the rank of each stage.
        times: seconds of each kind of operation, ``[kind][stage]``.
        hop: seconds from the end of a pass to its arrival on another rank.

    Returns:
        ``end``, when the last rank is done, in seconds; ``busy``, the seconds that each rank computes; ``free``, when
        each is done; ``starts``, when each operation of each rank begins.
    """
    forward_done = [[] for stage in range(stages)]
    backward_done = [{} for stage in range(stages)]
    at = [0 for order in orders]
    free = [0.0 for order in orders]
    busy = [0.0 for order in orders]
    starts = [[] for order in orders]
    left = len(orders)
    moved = True
    while left > 0 and moved:
        moved = False
        for rank in range(len(orders)):
            order = orders[rank]
            i = at[rank]
            now = free[rank]
            work = busy[rank]
            begin = starts[rank]
            while i < len(order):
                op = order[i]
                kind = op[0]
                stage = op[1]
                m = op[2]
                ready = now
                if kind == FORWARD:
                    if stage > 0:
                        before = forward_done[stage - 1]
                        if len(before) <= m:
                            break
                        ready = before[m]
                        if ranks[stage - 1] != rank:
                            ready += hop
                elif kind != WEIGHT and stage < stages - 1:
                    after = backward_done[stage + 1]
                    if m not in after:
                        break
                    ready = after[m]
                    if ranks[stage + 1] != rank:
                        ready += hop
                now = max(now, ready)
                begin.append(now)
                now += times[kind][stage]
                work += times[kind][stage]
                if kind == FORWARD:
                    forward_done[stage].append(now)
                elif kind != WEIGHT:
                    backward_done[stage][m] = now
                i += 1
            if i > at[rank]:
                moved = True
                if i == len(order):
                    left -= 1
            at[rank] = i
            free[rank] = now
            busy[rank] = work
    end = 0.0
    for moment in free:
        end = max(end, moment)
    return {"end": end if left == 0 else -1.0, "busy": busy, "free": free, "starts": starts}
