"""The trainer's line at step 10: what was predicted is what is measured."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--model.name", "qwen3_moe"],
        ["--model.name", "qwen3_moe", "--moe.save", "input"],
        ["--model.name", "qwen3_moe", "--moe.save", "preact_fp8"],
        ["--model.name", "deepseek_v3", "--model.override.mtp_depth", "1", "--training.document_mask"],
    ],
)
def test_saved_activations_are_predicted_within_5_percent(tmp_path, words):
    words = [*words, "--job.dump_folder", str(tmp_path), "--training.steps", "11", "--training.seq_len", "128"]
    words += ["--training.local_batch_size", "2", "--training.global_batch_size", "4", "--training.num_workers", "0"]
    command = [sys.executable, "-m", "titan_moe.train", *words]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (error,) = re.findall(r"predicted saved activations .* MiB, measured .* \((.*)%\)", text)
    assert abs(float(error)) < 5
