"""Every layout trains the model that one process trains: losses, gradients, norm, counters, weights; float64."""

import pytest
from fuzzing import check_case
from layout_run import EXACT, check, relative
from layout_table import MATRIX, QUICK
from model_case import TINY, Case, batch_of, build_alone, gradients_alone


def _marks(name: str) -> tuple:
    return () if name in QUICK else (pytest.mark.slow,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in MATRIX])
def test_layout_equals_one_process(run_ranks, references, name):
    check(MATRIX[name], run_ranks, references)


def test_the_matrix_has_sixty_layouts_of_eight_ranks():
    layouts = {repr((case.degrees, case.override, case.passes)) for case in MATRIX.values() if case.ranks == 8}
    assert len(layouts) >= 60


def test_every_layout_of_the_matrix_is_legal():
    for case in MATRIX.values():
        check_case(case)


@pytest.mark.parametrize("family", TINY)
def test_the_one_process_run_equals_a_loop_over_experts(family):
    case = Case(family)
    batch, gradients = batch_of(case, 0), []
    for experts in ("grouped", "sequential"):
        model = build_alone(case, experts=experts)
        losses = gradients_alone(model, case, batch, 1)
        gradients.append({"losses": losses, **{name: p.grad for name, p in model.named_parameters()}})
    got, want = gradients
    for name in want:
        assert relative(got[name], want[name]) < EXACT, name
