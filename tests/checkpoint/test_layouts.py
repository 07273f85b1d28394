"""Saved under any layout, loaded under any other: every tensor bit for bit, and the next step of training with it."""

from pathlib import Path

import pytest
import torch
from layout_states import FIFTEEN, LAYOUTS, load_and_compare, train_and_save

CASES = LAYOUTS | FIFTEEN
QUICK = ["one", "ep2 edp4", "pp2 vpp2 cp2 ep2"]


class Saved:
    """Checkpoints by layout, each made when first asked for, beside a file with what it must hold."""

    def __init__(self, folder: Path, pool) -> None:
        self.folder, self.pool = folder, pool

    def make(self, name: str) -> str:
        file = self.folder / f"{name}.pt"
        if not file.exists():
            answers = self.pool.run(CASES[name].ranks, train_and_save, CASES[name], str(self.folder / name))
            # Of a pipeline each rank has its stages' tensors; all others are the same everywhere.
            want = {**answers[0], "before": {}, "after": {}}
            for rank, answer in enumerate(answers):
                for when in ("before", "after"):
                    for key, tensor in answer[when].items():
                        same = torch.equal(want[when].setdefault(key, tensor), tensor)
                        assert same, (
                            f"{name}: {key} of rank {rank} is not what ranks before it have {when} the last step"
                        )
            torch.save(want, file)
        return name


@pytest.fixture(scope="module")
def saved(worker_pool, tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("layouts"), worker_pool)


def check(saved, run_ranks, target, sources):
    case = CASES[target]
    names = [saved.make(name) for name in sources]
    for worst in run_ranks(case.ranks, load_and_compare, case, str(saved.folder), names, target, timeout=300.0):
        assert worst.keys() == set(sources)
        assert worst.get(target, 0.0) == 0.0


@pytest.mark.parametrize("target", QUICK)
def test_some_layouts_load_what_others_saved(saved, run_ranks, target):
    check(saved, run_ranks, target, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(saved, run_ranks, target):
    assert len(LAYOUTS) == 12
    check(saved, run_ranks, target, list(LAYOUTS))


@pytest.mark.slow
@pytest.mark.parametrize("target", FIFTEEN)
def test_fifteen_experts_over_up_to_eight_ranks(saved, run_ranks, target):
    check(saved, run_ranks, target, list(FIFTEEN))
