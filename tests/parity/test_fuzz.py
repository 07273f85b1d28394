"""Random layouts: ``./run_tests.sh tests/parity --fuzz 100 --seed 0``; one draw again: ``--seed 0 --draw 17``."""

import pytest
from fuzzing import draw
from layout_run import check
from model_case import References

QUICK, SLOW = 3, 40


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" not in metafunc.fixturenames:
        return
    options = metafunc.config.option
    seed, wanted = options.seed, range(SLOW if options.fuzz is None else options.fuzz)
    numbers = wanted if options.draw is None else [options.draw]
    asked_for = options.fuzz is not None or options.draw is not None
    metafunc.parametrize(
        "seed, number",
        [
            pytest.param(seed, n, id=f"seed{seed}-draw{n}", marks=() if asked_for or n < QUICK else pytest.mark.slow)
            for n in numbers
        ],
    )


@pytest.mark.fuzz
def test_a_random_layout_equals_one_process(run_ranks, tmp_path, seed, number):
    case = draw(seed, number)
    print(f"{case}\nRepeat with: ./run_tests.sh tests/parity --seed {seed} --draw {number}")
    check(case, run_ranks, References(tmp_path))


def test_draws_are_repeatable_and_differ():
    assert draw(3, 5) == draw(3, 5)
    assert len({repr(draw(3, number)) for number in range(20)}) == 20
