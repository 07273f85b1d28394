"""Whole training runs of ``train_configs/parity.toml`` on a small corpus, for the tests that resume and kill them."""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_moe.config import load_config, validate
from titan_moe.observe import TIMING_KEYS
from titan_moe.plugins import chosen
from titan_moe.trainer import Trainer, train

PARITY = Path(__file__).parents[2] / "train_configs" / "parity.toml"
# A step takes some hundredths of a second on a core.
TINY = {"num_layers": 2, "dim": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "ffn_dim": 16, "hidden_dim": 8}
TINY_OPTIONS = [word for name, value in TINY.items() for word in (f"--model.override.{name}", str(value))]


def write_corpus(folder):
    for i in range(24):
        (folder / f"{i}.txt").write_text(f"document {i}: " + " ".join(str(i * j % 97) for j in range(100 + 7 * i)))
    return folder


def parity(corpus, out, *options):
    data = ["--training.dataset", "text", "--training.dataset_path", str(corpus)]
    return load_config(["--job.config_file", str(PARITY), "--job.dump_folder", str(out), *data, *options])


def train_on_rank(config):
    train(config)


def records(out):
    """What ``metrics.jsonl`` has of each step, without what depends on the clock; a torn last line is left out."""
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{key: value for key, value in record.items() if key not in TIMING_KEYS} for record in whole]


def train_until_killed(config, world, rank, store, note):
    """A rank of a run; rank 0 leaves in the file ``note`` the step after which it goes on."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    validate(config, world)
    trainer = Trainer(config, chosen(config))
    if rank == 0:
        Path(note).write_text(str(trainer.step_done))
    try:
        trainer.run()
    finally:
        trainer.close()
