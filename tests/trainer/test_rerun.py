"""Steps that pass ``moe.recv_capacity_factor``: the run is, bit for bit, one that never had a bound."""

from contextlib import contextmanager

import pytest
import torch
from test_trainer import config, exact

from titan_moe import rerun
from titan_moe.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")


def train_counting(run_config):
    """Train, and say how often a step ran again."""
    calls, plain = [], rerun.Rerun.without_bound

    @contextmanager
    def counted(self):
        calls.append(1)
        with plain(self):
            yield

    rerun.Rerun.without_bound = counted
    try:
        train(run_config)
    finally:
        rerun.Rerun.without_bound = plain
    return len(calls)


def both(run_ranks, ranks, corpus, tmp_path, factor, sections, **override):
    """Steps run again with the bound, and whether all numbers of both runs are equal."""
    again = {}
    for name, bound in (("free", None), ("bounded", factor)):
        moe = {**sections.get("moe", {}), "recv_capacity_factor": bound}
        run = config(corpus, tmp_path / name, {**sections, "moe": moe}, **override)
        again[name] = run_ranks(ranks, train_counting, run)
    assert again["free"] == [0] * ranks
    assert len(set(again["bounded"])) == 1
    return again["bounded"][0], exact(tmp_path / "bounded") == exact(tmp_path / "free")


EP2 = {"parallelism": {"expert_parallel_degree": 2}, "training": {"local_batch_size": 1}}
RECOMPUTED = {**EP2, "activation_checkpoint": {"mode": "full"}}


@pytest.mark.parametrize("sections", [EP2, RECOMPUTED], ids=["plain", "recomputed"])
def test_a_run_whose_steps_pass_the_bound_is_bitwise_one_without(run_ranks, corpus, tmp_path, sections):
    # Jitter draws random numbers, the bias follows the counts, and the losses share counters over micro-batches.
    again, equal = both(run_ranks, 2, corpus, tmp_path, 1.0, sections, jitter=0.1)
    assert again == 4 and equal


def test_a_run_within_its_bound_runs_no_step_again(run_ranks, corpus, tmp_path):
    again, equal = both(run_ranks, 2, corpus, tmp_path, 2.0, EP2, jitter=0.1)
    assert again == 0 and equal


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_largest_logits_of_a_step_that_runs_again_are_those_of_its_second_run(run_ranks, corpus, tmp_path, dispatcher):
    clip = {"name": "Muon", "lr": 1e-2, "qk_clip_threshold": 0.05}
    sections = {**EP2, "optimizer": clip, "moe": {"dispatcher": dispatcher}, "model": {"name": "mixtral"}}
    again, equal = both(run_ranks, 2, corpus, tmp_path, 1.0, sections)
    assert again > 0 and equal


@pytest.mark.slow
def test_stages_without_experts_run_again_with_the_others(run_ranks, corpus, tmp_path):
    parallelism = {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2}
    sections = {"parallelism": parallelism, "moe": {"global_aux_loss_coef": 0.0}}
    again, equal = both(run_ranks, 4, corpus, tmp_path, 1.0, sections, num_dense_layers=1, ffn_dim=24)
    assert again > 0 and equal


def test_evaluation_has_no_bound(run_ranks, corpus, tmp_path):
    validation = {"enable": True, "freq": 2, "steps": 1}
    again, equal = both(run_ranks, 2, corpus, tmp_path, 1.0, {**EP2, "validation": validation})
    assert again > 0 and equal


def test_without_experts_nothing_is_kept():
    model = torch.nn.Linear(2, 2)
    over = rerun.Rerun(model, None, torch.device("cpu"), bounded=False).overflow()
    assert over.shape == () and not over
