"""The orders and the simulation against torch's own schedules, and against bubbles worked out by hand."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from titan_moe.planner.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    folds,
    in_flight,
    order_of,
    rank_of,
    round_size,
    simulate,
)

KIND = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}
CLASSES = {
    "LoopedBFS": torch_schedules.ScheduleLoopedBFS,
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


def orders(name: str, pp: int, vpp: int, count: int) -> list:
    return [order_of(name, rank, pp, vpp, count, round_size(name, pp, count)) for rank in range(pp)]


def torch_order(name: str, rank: int, pp: int, vpp: int, count: int) -> list:
    """The order that torch's class works out, without building stages."""
    schedule = object.__new__(CLASSES[name])
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = pp, vpp, count
    schedule.num_stages, schedule._num_stages, schedule.rank = pp * vpp, pp * vpp, rank
    schedule.number_of_rounds = max(1, count // pp)
    schedule.microbatches_per_round = count // schedule.number_of_rounds

    class Stage:
        pass

    schedule._stages = []
    for chunk in range(vpp):
        stage = Stage()
        stage.stage_index = chunk * pp + rank
        schedule._stages.append(stage)
    actions = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
    flat = [part for action in actions for part in (action.sub_actions or (action,))]
    return [[KIND[part.computation_type.value], part.stage_index, part.microbatch_index] for part in flat]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", CLASSES)
def test_orders_are_those_that_torch_runs(name, pp):
    two = folds(name)
    for vpp in (2,) if two else (1, 2, 4):
        for count in (2 * pp, 2 * pp + 1, 4 * pp + 3) if two else (pp, 2 * pp, 4 * pp, 4 * pp + 4):
            if count % max(1, count // pp) and not two:
                continue
            for rank in range(pp):
                size = round_size(name, pp, count)
                assert order_of(name, rank, pp, vpp, count, size) == torch_order(name, rank, pp, vpp, count)


def test_plain_1f1b_and_gpipe_by_hand():
    F0, F1, F2 = ([FORWARD, 0, m] for m in range(3))
    B0, B1, B2 = ([BACKWARD, 0, m] for m in range(3))
    assert order_of("1F1B", 0, 2, 1, 3, 2) == [F0, F1, B0, F2, B1, B2]
    assert order_of("GPipe", 0, 2, 1, 3, 2) == [F0, F1, F2, B0, B1, B2]


def run(name: str, pp: int, vpp: int, count: int, times: list) -> dict:
    stages = pp * vpp
    ranks = [rank_of(stage, pp, folds(name)) for stage in range(stages)]
    return simulate(orders(name, pp, vpp, count), stages, ranks, times, 0)


def equal_times(stages: int, forward: float, back: float, weight: float) -> list:
    return [[x] * stages for x in (forward, back + weight, back, weight)]


@pytest.mark.parametrize(("pp", "count"), [(2, 8), (4, 8), (8, 16)])
def test_the_bubble_of_1f1b_is_that_of_the_textbook(pp, count):
    assert run("1F1B", pp, 1, count, equal_times(pp, 1, 1, 1))["end"] == 3 * (count + pp - 1)


@pytest.mark.parametrize("vpp", [2, 4])
def test_interleaving_divides_the_bubble(vpp):
    pp, count = 4, 16
    # Each of the stages of a rank is 1 / vpp of its layers (arXiv 2104.04473, section 2.2.2).
    end = run("Interleaved1F1B", pp, vpp, count, equal_times(pp * vpp, 1 / vpp, 1 / vpp, 1 / vpp))["end"]
    assert end == pytest.approx(3 * (count + (pp - 1) / vpp))


def test_zero_bubble_schedules_leave_less_idle_than_1f1b():
    pp, count = 4, 16
    ends = {
        name: run(name, pp, vpp, count, equal_times(pp * vpp, 1 / vpp, 1 / vpp, 1 / vpp))["end"]
        for name, vpp in (("1F1B", 1), ("InterleavedZeroBubble", 1), ("ZBVZeroBubble", 2), ("DualPipeV", 2))
    }
    work = 3 * count
    assert ends["1F1B"] - work == 9
    # ZB-1P leaves (pp - 1)(forward + input - weight); ZB-V leaves none but the way to the first rank's first W.
    assert ends["InterleavedZeroBubble"] - work < 9
    assert ends["ZBVZeroBubble"] - work <= 3 and ends["DualPipeV"] - work <= 3


@pytest.mark.parametrize("rank", range(4))
def test_chunks_in_flight_of_interleaved_1f1b(rank):
    pp, vpp = 4, 4
    order = order_of("Interleaved1F1B", rank, pp, vpp, 16, 4)
    passes, _ = in_flight(order, 16, [1] * 16, [0] * 16)
    assert sum(passes) == 2 * (pp - 1 - rank) + (vpp - 1) * pp + 1


def test_1f1b_keeps_one_pass_per_rank_behind():
    for rank in range(4):
        passes, _ = in_flight(order_of("1F1B", rank, 4, 1, 16, 4), 4, [1] * 4, [0] * 4)
        assert sum(passes) == 4 - rank


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_long_steps_are_extrapolated_exactly_where_rounds_repeat(name):
    from types import SimpleNamespace

    from titan_moe.planner.predict import pipeline

    pp, vpp = 4, 1 if name == "1F1B" else 2
    times = [[1.0 + 0.1 * stage for stage in range(pp * vpp)] for _ in range(4)]
    times[1] = [a + b for a, b in zip(times[2], times[3], strict=True)]
    values = {"pp": pp, "vpp": vpp, "schedule": name, "count": 2048}
    quick, whole = (pipeline(SimpleNamespace(**values, exact=exact), times, 0.05) for exact in (False, True))
    assert quick["end"] == pytest.approx(whole["end"], rel=1e-9)
    assert quick["busy"] == pytest.approx(whole["busy"], rel=1e-9)
