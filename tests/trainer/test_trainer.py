"""The loop: same numbers under every number of processes, exact resume, clean stops, clear failures."""

import json
import math
import os
import signal
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from titan_moe import trainer as trainer_module
from titan_moe.config import from_dict
from titan_moe.data import build_tokenizer, train_tokenizer
from titan_moe.errors import CheckpointError, ConfigError, TrainingError
from titan_moe.observe import TIMING_KEYS
from titan_moe.parallelize import build
from titan_moe.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")


def config(corpus, out, sections=None, **override):
    """A run of seconds: two layers, everything that could depend on the layout switched on."""
    tree = {
        "job": {"dump_folder": str(out)},
        "model": {
            "name": "qwen3_moe",
            "flavor": "debug",
            "override": {
                "dim": 32,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 16,
                "hidden_dim": 16,
                "num_experts": 4,
                "expert_bias": True,
                "max_seq_len": 64,
                **override,
            },
        },
        "training": {
            "dataset": "text",
            "dataset_path": str(corpus),
            "seq_len": 32,
            "local_batch_size": 2,
            "global_batch_size": 4,
            "steps": 4,
            "num_workers": 0,
            "dtype": "float64",
        },
        "optimizer": {"lr": 1e-2},
        "lr_scheduler": {"warmup_steps": 2},
        "moe": {"seq_aux_loss_coef": 0.01, "global_aux_loss_coef": 0.01, "z_loss_coef": 1e-3},
        "metrics": {"enable_tensorboard": False},
    }
    for section, values in (sections or {}).items():
        tree.setdefault(section, {}).update(values)
    return from_dict(tree)


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def exact(out):
    """All that does not depend on the clock."""
    return [{key: value for key, value in record.items() if key not in TIMING_KEYS} for record in records(out)]


def train_on_rank(run_config):
    train(run_config)


@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (4, 2)])
def test_processes_change_nothing(run_ranks, corpus, tmp_path, ranks, replicate):
    # No accumulation on either side: the global loss's f is that of the step so far.
    train(config(corpus, tmp_path / "one", {"training": {"local_batch_size": 4}}))
    sections = {
        "training": {"local_batch_size": 4 // ranks},
        "parallelism": {"data_parallel_replicate_degree": replicate},
    }
    run_ranks(ranks, train_on_rank, config(corpus, tmp_path / "many", sections))
    for one, many in zip(records(tmp_path / "one"), records(tmp_path / "many"), strict=True):
        # float64 rounding, amplified by four optimizer steps.
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
        for layer, other in zip(one["moe"], many["moe"], strict=True):
            assert other["load"] == layer["load"]
            for key in ("aux_loss", "z_loss"):
                assert layer[key] > 0 and other[key] == pytest.approx(layer[key], rel=1e-10)
            assert (other["bias_min"], other["bias_max"]) == (layer["bias_min"], layer["bias_max"])


def test_accumulation_changes_nothing(corpus, tmp_path):
    # Without the global loss: its f is that of the step so far, so the first micro-batches see less of it.
    moe = {"moe": {"global_aux_loss_coef": 0.0}}
    train(config(corpus, tmp_path / "two", moe))
    train(config(corpus, tmp_path / "one", {**moe, "training": {"local_batch_size": 4}}))
    for a, b in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-10)


def test_resumed_run_is_bitwise_the_uninterrupted_one(corpus, tmp_path):
    checkpoint = {"checkpoint": {"enable": True, "interval": 2}, "training": {"dtype": "float32"}}
    # Jitter draws random numbers, so their state is part of the resume.
    train(config(corpus, tmp_path / "whole", checkpoint, jitter=0.1))
    half = {**checkpoint, "training": {"dtype": "float32", "steps": 4}}
    stopped = config(corpus, tmp_path / "parts", half, jitter=0.1)
    seen = []

    class Killed(Exception):
        pass

    original = trainer_module.Trainer.step

    def step(self, batches):
        if self.step_done == 3:
            raise Killed
        original(self, batches)
        seen.append(self.step_done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "step", step)
        with pytest.raises(Killed):
            train(stopped)
    assert seen == [1, 2, 3]
    train(stopped)
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")


def test_twice_the_same_run_is_bitwise_equal(corpus, tmp_path):
    for name in ("a", "b"):
        train(config(corpus, tmp_path / name, {"debug": {"deterministic": True}}))
    torch.use_deterministic_algorithms(False)
    assert exact(tmp_path / "a") == exact(tmp_path / "b")


@pytest.mark.parametrize(
    "sections",
    [
        {"activation_checkpoint": {"mode": "full"}},
        {"activation_checkpoint": {"mode": "selective"}, "moe": {"global_aux_loss_coef": 0.0}},
        {"activation_checkpoint": {"mode": "targets", "targets": ["layernorm", "qk_norm", "core_attn", "moe"]}},
        {
            "activation_checkpoint": {"mode": "targets", "targets": ["layernorm"]},
            "activation_offload": {"targets": ["attn_norm", "core_attn", "moe_act"], "min_bytes": 0, "fraction": 0.7},
        },
    ],
    ids=["full", "selective", "targets", "offload"],
)
def test_recompute_and_offload_change_nothing(corpus, tmp_path, sections):
    losses = {"moe": sections.get("moe", {})}
    train(config(corpus, tmp_path / "plain", losses, jitter=0.1))
    train(config(corpus, tmp_path / "saving", sections, jitter=0.1))
    assert exact(tmp_path / "saving") == exact(tmp_path / "plain")


def train_compiled_on_rank(run_config):
    """Train; returns how many graphs were compiled, by torch's own backend without the C++ compiler's minute."""
    torch.compiler.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
        train(run_config)
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_layers_are_compiled_whatever_runs_again_or_travels(run_ranks, corpus, tmp_path, ranks):
    choices = {
        "plain": {},
        "full": {"activation_checkpoint": {"mode": "full"}},
        "targets": {"activation_checkpoint": {"mode": "targets", "targets": ["layernorm", "qk_norm", "core_attn"]}},
        "offload": {"activation_offload": {"targets": ["layers.*"], "min_bytes": 0}},
    }
    graphs = {}
    for name, sections in choices.items():
        sections = {"training": {"local_batch_size": 4 // ranks}, **sections}
        if name == "plain":
            run_ranks(ranks, train_on_rank, config(corpus, tmp_path / name, sections))
        train_one = config(corpus, tmp_path / f"compiled {name}", {**sections, "compile": {"enable": True}})
        graphs[name] = run_ranks(ranks, train_compiled_on_rank, train_one, timeout=300.0)
        for one, other in zip(records(tmp_path / "plain"), records(tmp_path / f"compiled {name}"), strict=True):
            # float64 rounding, amplified by four optimizer steps.
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-10), name
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10), name
            assert [layer["load"] for layer in other["moe"]] == [layer["load"] for layer in one["moe"]], name
    assert min(graphs["plain"]) > 0
    assert all(counts == graphs["plain"] for counts in graphs.values()), graphs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_ends(corpus, tmp_path, capsys, monkeypatch, number):
    original = trainer_module.Trainer.step

    def step(self, batches):
        original(self, batches)
        if self.step_done == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(trainer_module.Trainer, "step", step)
    before = signal.getsignal(number)
    run = config(corpus, tmp_path, {"checkpoint": {"enable": True, "interval": 100}})
    train(run)
    assert signal.getsignal(number) is before
    # Ranks agree on it in the step that follows the signal.
    assert (tmp_path / "checkpoint" / "step-3" / "manifest.json").is_file()
    assert f"stopped by {number.name} after step 3; its checkpoint is saved" in capsys.readouterr().out
    monkeypatch.setattr(trainer_module.Trainer, "step", original)
    train(run)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]


def poison(monkeypatch, step_number, value=math.nan):
    """The loss of one step is not finite, and so are its gradients."""
    original = build.token_losses
    calls = []

    def token_losses(*args, **kwargs):
        losses = original(*args, **kwargs)
        calls.append(1)
        # Two micro-batches a step.
        factor = value if (len(calls) + 1) // 2 == step_number else 1.0
        return type(losses)(*(part * factor for part in losses))

    monkeypatch.setattr(build, "token_losses", token_losses)


def test_loss_that_is_not_finite_stops_with_step_rank_and_checkpoint(corpus, tmp_path, monkeypatch):
    poison(monkeypatch, 3)
    run = config(corpus, tmp_path, {"checkpoint": {"enable": True, "interval": 1}})
    with pytest.raises(TrainingError, match=r"step 3: loss = nan.*rank 0.*last good checkpoint is step 2"):
        train(run)


def test_skipped_step_leaves_weights_and_bias_alone(corpus, tmp_path, monkeypatch):
    poison(monkeypatch, 3, math.inf)
    run = config(corpus, tmp_path, {"checkpoint": {"enable": True, "interval": 1}, "training": {"skip_nonfinite": 1}})
    state = {}
    original = trainer_module.Trainer.step

    def step(self, batches):
        original(self, batches)
        state[self.step_done] = {name: t.clone() for name, t in self.model.state_dict().items()}

    monkeypatch.setattr(trainer_module.Trainer, "step", step)
    train(run)
    assert all(torch.equal(state[2][name], tensor) for name, tensor in state[3].items())
    assert not all(torch.equal(state[3][name], tensor) for name, tensor in state[4].items())
    assert [record.get("skipped") for record in records(tmp_path)] == [None, None, 1, None]


def test_too_many_skipped_steps_stop(corpus, tmp_path, monkeypatch):
    original = build.token_losses

    def token_losses(*args, **kwargs):
        losses = original(*args, **kwargs)
        return type(losses)(*(part * math.nan for part in losses))

    monkeypatch.setattr(build, "token_losses", token_losses)
    with pytest.raises(TrainingError, match=r"step 3: .*there is no checkpoint"):
        train(config(corpus, tmp_path, {"training": {"skip_nonfinite": 2}}))
    # The two skipped steps are on record; the one that stopped the run is not.
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


@pytest.mark.parametrize("training", [{"dtype": "float16"}, {"dtype": "float32", "mixed_precision_param": "float16"}])
def test_float16_compute_trains_under_a_loss_scale(corpus, tmp_path, training):
    run = trainer_module.Trainer(config(corpus, tmp_path, {"training": training}), [])
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.scaler.scale == 2.0**16
    run.run()
    run.close()
    reference = config(corpus, tmp_path / "fp32", {"training": {"dtype": "float32"}})
    train(reference)
    losses = [record["loss"] for record in records(tmp_path)]
    expected = [record["loss"] for record in records(tmp_path / "fp32")]
    # Half precision has 11 bits: 5e-4 per operation.
    assert losses == pytest.approx(expected, rel=5e-3)


def test_bfloat16_parameters_keep_the_router_in_float32(corpus, tmp_path):
    run = config(corpus, tmp_path, {"training": {"dtype": "bfloat16"}})
    trainer = trainer_module.Trainer(run, [])
    dtypes = {name: p.dtype for name, p in trainer.model.named_parameters()}
    trainer.run()
    assert {d for name, d in dtypes.items() if ".router." in name} == {torch.float32}
    assert {d for name, d in dtypes.items() if ".router." not in name} == {torch.bfloat16}
    assert all(math.isfinite(record["loss"]) for record in records(tmp_path))


def test_validation_is_a_mean_over_held_out_tokens(corpus, tmp_path):
    run = config(corpus, tmp_path, {"validation": {"enable": True, "fraction": 0.3, "freq": 2, "steps": -1}})
    trainer = trainer_module.Trainer(run, [])
    batches = list(trainer.val_loader)
    trainer.evaluate()
    trainer.model.eval()
    total = count = 0
    for batch in batches:
        for ids, labels, docs in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
            logits = trainer.model(ids[None], document_ids=docs[None])[0]
            for t in range(len(ids)):
                if labels[t] >= 0:
                    total -= logits[t].log_softmax(0)[labels[t]].item()
                    count += 1
    record = records(tmp_path)[-1]
    assert record["val_loss"] == pytest.approx(total / count, rel=1e-12)
    assert record["val_tokens"] == count
    trainer.logger.close()


def test_evaluation_changes_no_training_number(corpus, tmp_path):
    train(config(corpus, tmp_path / "with", {"validation": {"enable": True, "fraction": 0.3, "freq": 1}}))
    train(config(corpus, tmp_path / "rare", {"validation": {"enable": True, "fraction": 0.3, "freq": 100}}))
    lines = [[r for r in exact(tmp_path / name) if "loss" in r] for name in ("with", "rare")]
    assert lines[0] == lines[1]


def test_vocabulary_smaller_than_the_tokenizers(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size = 100 is smaller than the 257 tokens.*at least 257"):
        train(config(corpus, tmp_path, vocab_size=100))


def test_sequence_longer_than_the_models(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"training.seq_len = 128 is beyond the model's max_seq_len = 64"):
        train(config(corpus, tmp_path, {"training": {"seq_len": 128}}))


def test_unknown_family_names_the_nearest(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"qwen3_mo.*'qwen3_moe'"):
        train(config(corpus, tmp_path, {"model": {"name": "qwen3_mo"}}))


def test_checkpoint_of_another_model_is_refused(corpus, tmp_path):
    train(config(corpus, tmp_path, {"checkpoint": {"enable": True}}))
    with pytest.raises(CheckpointError, match=r"of another shape"):
        train(config(corpus, tmp_path, {"checkpoint": {"enable": True}}, hidden_dim=24))


def test_mtp_loss_is_reported_and_trained(corpus, tmp_path):
    run = config(corpus, tmp_path, mtp_depth=1)
    trainer = trainer_module.Trainer(run, [])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if name.startswith("mtp.")}
    trainer.run()
    after = dict(trainer.model.named_parameters())
    assert before and all(not torch.equal(after[name], value) for name, value in before.items())
    assert all(0 < record["mtp_loss"] < 8 for record in records(tmp_path))


def test_an_exported_run_starts_another_as_its_checkpoint_does(corpus, tmp_path):
    """The weights pass through Hugging Face names and files unchanged; optimizer and data start anew in both."""
    folder = tmp_path / "tokenizer"
    train_tokenizer(dataset="text", dataset_path=str(corpus), vocab_size=260, output=str(folder))
    bpe = {"model": {"tokenizer": str(folder)}, "moe": {}}
    saving = {"enable": True, "last_save_in_hf": True}
    train(config(corpus, tmp_path / "first", bpe | {"checkpoint": saving}, expert_bias=False))
    assert build_tokenizer(str(tmp_path / "first" / "hf")).identity == build_tokenizer(str(folder)).identity
    for name, section in (
        ("of_hf", {"initial_load_path": str(tmp_path / "first" / "hf"), "initial_load_in_hf": True}),
        ("of_own", {"initial_load_path": str(tmp_path / "first" / "checkpoint")}),
    ):
        train(config(corpus, tmp_path / name, bpe | {"checkpoint": {"enable": True} | section}, expert_bias=False))
    assert exact(tmp_path / "of_hf") == exact(tmp_path / "of_own")
    assert exact(tmp_path / "of_hf")[0]["loss"] < exact(tmp_path / "first")[0]["loss"] - 0.1
