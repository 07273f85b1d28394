"""What ``titan-moe inspect`` says of a checkpoint, and of two."""

import torch
from torch import nn
from training import start, train

from titan_moe.checkpoint import Checkpointer, rng_tensors
from titan_moe.cli import main

CONFIG = {
    "model": {"name": "qwen3_moe", "flavor": "debug", "override": {"dim": 6}},
    "parallelism": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
}


def save(folder, *, step=1, tokens=4096, change=None, config=CONFIG, extra_parameter=False):
    model, optimizer = start()
    if extra_parameter:
        model.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    train(model, optimizer, [1])
    if change is not None:
        change(model, optimizer)
    extra = {"tokens": tokens, "config": config, "loader": {"sample": 3}}
    return Checkpointer(folder).save(step, model, optimizer, extra=extra, rank_tensors=rng_tensors())


def run(capsys, *argv, code=0):
    try:
        main(["inspect", *map(str, argv)])
        ended = 0
    except SystemExit as end:
        ended = end.code
    out, err = capsys.readouterr()
    assert ended == code, (ended, out, err)
    return out + err


def save_on_ranks(folder):
    save(folder)


def test_model_layout_step_size_and_every_tensor(run_ranks, tmp_path, capsys):
    run_ranks(2, save_on_ranks, str(tmp_path))
    out = run(capsys, tmp_path)
    assert "qwen3_moe debug dim=6: 10 tensors" in out and "step       1, 4,096 tokens" in out
    assert "saved by   2 processes: dense tp 2; experts ep 2" in out
    size = sum(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
    assert f"{size / 2**20:,.1f} MiB in 5 files" in out and "all 4 checksums fit" in out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line.startswith(("model.", "rank."))}
    assert (
        rows["model.layers.0.w1"][1:]
        == "[3, 2, 5, 6] float64 2 exp_avg float64, exp_avg_sq float64, step float32".split()
    )
    assert rows["model.layers.0.expert_bias"][1:] == ["[3]", "float64", "1"]
    assert "rank.1.rng_cpu" in rows and "uint8" in rows["rank.1.rng_cpu"]
    # 7 x 6 embedding, 2 layers of 3 x 2 x 5 x 6 + 6 + 6 + 3, 2 unused.
    assert f"{42 + 2 * (180 + 15) + 2:,} values" in out


def test_a_checkpoint_without_a_run_and_one_of_an_unknown_layout(tmp_path, capsys):
    Checkpointer(tmp_path / "a").save(3, start()[0])
    out = run(capsys, tmp_path / "a" / "step-3")
    assert "unknown (no training run wrote it)" in out and "optimizer  none" in out
    save(tmp_path / "b", config={"parallelism": {"hyper_degree": 2}, "model": 3})
    assert "a layout that this version does not know" in run(capsys, tmp_path / "b")


def test_a_damaged_file_is_named_and_ends_in_1(tmp_path, capsys):
    folder = save(tmp_path)
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[100] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)
    out = run(capsys, tmp_path, code=1)
    assert f"{folder / '__0_0.distcp'} damaged" in out and "checksums fit" not in out
    out = run(capsys, tmp_path, "--no_verify")
    assert "model.layers.0.w1" in out and "checksums" not in out
    (folder / "state.json").unlink()
    assert f"{folder / 'state.json'} is missing" in run(capsys, folder, code=1)


def save_sharded(folder):
    save(folder, config={**CONFIG, "parallelism": {}})


def test_two_layouts_of_one_state_do_not_differ(run_ranks, tmp_path, capsys):
    run_ranks(2, save_on_ranks, str(tmp_path / "one"))
    run_ranks(2, save_sharded, str(tmp_path / "other"))
    out = run(capsys, tmp_path / "one", "--diff", tmp_path / "other")
    assert "no difference" in out
    assert "(configuration, not counted) parallelism.tensor_parallel_degree: 2 and None" in out


def test_every_kind_of_difference_is_listed_and_ends_in_1(tmp_path, capsys):
    def change(model, optimizer):
        with torch.no_grad():
            model.layers["1"].w1[2, 0, 1, 3] += 0.25
            model.layers["0"].expert_bias[0] = -0.0
            optimizer.state[model.embed.weight]["exp_avg"] += 1
            model.layers["0"].norm.weight.data = model.layers["0"].norm.weight.float()

    save(tmp_path / "one", change=lambda model, _: model.layers["0"].expert_bias[:1].zero_())
    save(tmp_path / "other", step=2, tokens=5, change=change, extra_parameter=True)
    out = run(capsys, tmp_path / "one", "--diff", tmp_path / "other", code=1)
    assert "step: 1 and 2" in out and "extra.tokens: 4096 and 5" in out
    assert "model.layers.1.w1: 1 of 180 values differ, by at most 0.25" in out
    assert "model.layers.0.expert_bias: 1 of 3 values differ, by at most 0" in out
    assert "optim.embed.weight.exp_avg: 42 of 42 values differ, by at most 1" in out
    assert "model.layers.0.norm.weight: [6] float64 and [6] float32" in out
    assert f"model.extra: only in {tmp_path / 'other' / 'step-2'}" in out
    assert "7 differences" in out


def test_no_folder_and_unknown_options(tmp_path, capsys):
    assert "name a run's dump folder" in run(capsys, code=2)
    assert "no such folder" in run(capsys, tmp_path / "nowhere", code=1)
    assert "unknown option" in run(capsys, tmp_path, "--dif", "x", code=2)
