"""``train_configs/parity.toml`` resumed under another layout, and what the checkpoint keys do to a run."""

import shutil

import pytest
import torch
from small_run import TINY_OPTIONS, parity, records, train_on_rank, write_corpus

from titan_moe.config import validate
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.trainer import Trainer, train

pytestmark = pytest.mark.usefixtures("one_thread")

DEGREES = {
    1: {},
    2: {"tensor": 2, "expert": 2},
    4: {"pipeline": 2, "expert": 2},
    8: {"tensor": 2, "context": 2, "expert": 2, "expert_tensor": 2},
}
STEPS = ("--training.steps", "4", "--checkpoint.enable", "--checkpoint.interval", "2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def layout(ranks):
    degrees = [(f"--parallelism.{axis}_parallel_degree", str(n)) for axis, n in DEGREES[ranks].items()]
    return [word for pair in degrees for word in pair]


def steps_3_and_4(out):
    found = [(record["loss"], record["grad_norm"]) for record in records(out) if record["step"] > 2]
    assert len(found) == 2
    return found


def check_resumes(run_ranks, corpus, tmp_path, saved_by, loaded_by, *options):
    for ranks in saved_by:
        run = parity(corpus, tmp_path / str(ranks), "--training.dtype", "float64", *STEPS, *layout(ranks), *options)
        run_ranks(ranks, train_on_rank, run, timeout=300.0)
        want = steps_3_and_4(tmp_path / str(ranks))
        for others in loaded_by:
            out = tmp_path / f"{ranks} to {others}"
            shutil.copytree(tmp_path / str(ranks) / "checkpoint" / "step-2", out / "checkpoint" / "step-2")
            run = parity(corpus, out, "--training.dtype", "float64", *STEPS, *layout(others), *options)
            run_ranks(others, train_on_rank, run, timeout=300.0)
            got = steps_3_and_4(out)
            if others == ranks:
                assert got == want
            for one, other in zip(want, got, strict=True):
                # float64 rounding, amplified by two optimizer steps.
                assert other == pytest.approx(one, rel=1e-10), (ranks, others)


def test_a_run_resumes_on_another_number_of_processes(run_ranks, corpus, tmp_path):
    check_resumes(run_ranks, corpus, tmp_path, [2], [1], *TINY_OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", DEGREES)
def test_parity_resumes_between_worlds_of_1_2_4_and_8(run_ranks, corpus, tmp_path, saved_by):
    check_resumes(run_ranks, corpus, tmp_path, [saved_by], list(DEGREES))


def tiny(corpus, out, *options):
    return parity(corpus, out, *TINY_OPTIONS, "--training.global_batch_size", "4", *STEPS, *options)


@pytest.mark.parametrize("mode", ["async", pytest.param("process", marks=pytest.mark.slow)])
def test_a_run_that_saves_beside_itself_resumes_bit_for_bit(corpus, tmp_path, mode):
    train(tiny(corpus, tmp_path / "plain"))
    run = tiny(corpus, tmp_path / mode, "--checkpoint.async_mode", mode, "--checkpoint.interval", "1")
    train(run)
    assert records(tmp_path / mode) == records(tmp_path / "plain")
    assert (tmp_path / mode / "checkpoint" / "step-4" / "manifest.json").is_file()
    for step in (3, 4):
        shutil.rmtree(tmp_path / mode / "checkpoint" / f"step-{step}")
    train(run)
    assert records(tmp_path / mode) == records(tmp_path / "plain")


def lose_the_folder(monkeypatch, after):
    """The checkpoint folder is moved away after a step, and comes back after the next."""
    original = Trainer.step

    def step(self, batches):
        folder = self.checkpointer.folder
        away = folder.with_name("away")
        if away.exists():
            # The write of the step before has to have failed by now.
            while self.checkpointer.writing:
                pass
            away.rename(folder)
        original(self, batches)
        if self.step_done == after:
            if self.checkpointer.writing:
                self.checkpointer.wait()
            folder.rename(away)

    monkeypatch.setattr(Trainer, "step", step)


@pytest.mark.parametrize("mode, told_at", [("disabled", 2), ("async", 3)])
def test_a_checkpoint_that_cannot_be_written_stops_a_strict_run(corpus, tmp_path, monkeypatch, mode, told_at):
    lose_the_folder(monkeypatch, 2)
    run = tiny(corpus, tmp_path, "--checkpoint.async_mode", mode, "--checkpoint.interval", "1")
    kept = "there is no complete checkpoint" if mode == "disabled" else "the newest complete one is step 1"
    with pytest.raises(CheckpointError, match=rf"saving step 2 in .* failed: No such file or directory.*; {kept}"):
        train(run)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, told_at + 1))


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_that_is_not_strict_says_so_and_goes_on(corpus, tmp_path, monkeypatch, capsys, mode):
    lose_the_folder(monkeypatch, 2)
    options = ["--checkpoint.async_mode", mode, "--checkpoint.interval", "1", "--checkpoint.no_strict"]
    train(tiny(corpus, tmp_path, *options))
    out = capsys.readouterr().out
    assert "saving step 2 in" in out and "training goes on" in out
    steps = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert steps == ["step-1", "step-3", "step-4"]


def trainer_of(run):
    validate(run)
    trainer = Trainer(run, [])
    trainer.logger.close()
    trainer.close()
    return trainer


def test_load_only_model_starts_anew_with_the_weights(corpus, tmp_path):
    first = tiny(corpus, tmp_path, "--training.steps", "2")
    trained = Trainer(first, [])
    trained.run()
    trained.close()
    trainer = trainer_of(tiny(corpus, tmp_path, "--checkpoint.load_only", "model"))
    for (name, want), got in zip(trained.model.state_dict().items(), trainer.model.state_dict().values(), strict=True):
        assert torch.equal(got, want), name
    assert not trainer.optimizer.state and (trainer.step_done, trainer.tokens, trainer.lr_ahead) == (0, 0, 0)
    fresh = trainer_of(tiny(corpus, tmp_path / "fresh"))
    assert trainer.loader.state_dict() == fresh.loader.state_dict() != trained.loader.state_dict()


def test_exclude_from_loading_starts_the_named_parts_anew(corpus, tmp_path):
    first = tiny(corpus, tmp_path, "--training.steps", "2")
    trained = Trainer(first, [])
    trained.run()
    trained.close()
    exclude = ["--checkpoint.exclude_from_loading"]
    no_optimizer = trainer_of(tiny(corpus, tmp_path, *exclude, "optimizer", "model.lm_head.*"))
    assert not no_optimizer.optimizer.state and no_optimizer.step_done == 2
    head = no_optimizer.model.lm_head.weight
    assert not torch.equal(head, trained.model.lm_head.weight)
    assert torch.equal(head, trainer_of(tiny(corpus, tmp_path / "fresh")).model.lm_head.weight)
    assert torch.equal(no_optimizer.model.embed_tokens.weight, trained.model.embed_tokens.weight)
    assert no_optimizer.loader.state_dict() == trained.loader.state_dict()

    # The rate begins its warm-up again, and what a later resume finds goes on from there.
    no_schedule = Trainer(tiny(corpus, tmp_path, *exclude, "lr_scheduler"), [])
    no_schedule.run()
    no_schedule.close()
    train(tiny(corpus, tmp_path / "anew"))
    rates = {record["step"]: record["lr"] for record in records(tmp_path)}
    first_rates = {record["step"]: record["lr"] for record in records(tmp_path / "anew")}
    assert [rates[3], rates[4]] == [first_rates[1], first_rates[2]] != [first_rates[3], first_rates[4]]
    assert trainer_of(tiny(corpus, tmp_path)).lr_ahead == -2

    no_step = trainer_of(tiny(corpus, tmp_path, *exclude, "train_state", "dataloader", "rng"))
    assert (no_step.step_done, no_step.tokens, no_step.lr_ahead) == (0, 0, 2)


@pytest.mark.parametrize(
    "options, match",
    [
        (["--checkpoint.exclude_from_loading", "optimiser"], r"'optimiser': neither .* Did you mean 'optimizer'"),
        (["--checkpoint.exclude_from_loading", "rng", "--checkpoint.load_only", "model"], r"Set one of them"),
        (["--checkpoint.no_enable", "--checkpoint.load_only", "model"], r"load_only needs checkpoint.enable"),
        (["--checkpoint.timeout_seconds", "0"], r"timeout_seconds = 0: must be at least 1"),
    ],
)
def test_keys_that_cannot_work_are_refused(corpus, tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        train(tiny(corpus, tmp_path, *options))
