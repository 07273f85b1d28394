"""The titan-moe command and the launcher, with a stand-in for the training itself."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_moe import __version__, launch
from titan_moe.cli import main
from titan_moe.errors import ConfigError, DataError, reported
from titan_moe.launch import process_count

# Takes the trainer's place in every process that starts with it on its path.
STAND_IN = """
import atexit, os, signal, sys, time, types

def train(config):
    rank, mode = int(os.environ.get("RANK", 0)), config.job.description
    if mode == "error":
        from titan_moe.errors import DataError
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            raise DataError("line 3 of x.jsonl is broken")
        time.sleep(0.2)
        raise ConnectionError("closed by peer")
    if mode == "lingers":
        from titan_moe.errors import ConfigError
        marker = config.job.dump_folder + "/left"
        if rank == 0:
            atexit.register(lambda: (open(marker, "w").close(), time.sleep(60)))
            raise ConfigError("too many of them")
        while not os.path.exists(marker):
            time.sleep(0.02)
        raise ConnectionError("closed by peer")
    if mode == "killed" and rank == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(1))
    # Unbuffered, print writes word by word, and the ranks share the pipe.
    say = lambda line: os.write(1, (line + "\\n").encode())
    if mode == "wait":
        say(f"pid {os.getpid()}")
    while mode != "ok" and not stop:
        time.sleep(0.02)
    say(f"saved by rank {rank} with {os.environ.get('OMP_NUM_THREADS')} threads")

sys.modules["titan_moe.trainer"] = types.SimpleNamespace(train=train)
"""


@pytest.fixture
def start(tmp_path: Path):
    """``start(ngpu, mode, *options) -> Popen`` of ``titan-moe train``."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)

    def run(ngpu: int, mode: str, *options: str) -> subprocess.Popen:
        paths = [str(tmp_path), str(Path(__file__).parents[1])]
        environment = {**os.environ, "NGPU": str(ngpu), "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, "-m", "titan_moe.cli", "train", "--job.description", mode]
        return subprocess.Popen(
            [*command, "--job.dump_folder", str(tmp_path / "out"), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def ended(code: int | None, *argv: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == code


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_help_and_version(capsys):
    main([])
    assert "doctor" in capsys.readouterr().out
    main(["--help"])
    assert "generate" in capsys.readouterr().out
    for command in ("doctor", "report"):
        main([command, "--help"])
        assert f"titan-moe {command}: " in capsys.readouterr().out
    ended(0, "tokenizer", "--help")
    assert "--vocab_size" in capsys.readouterr().out
    main(["--version"])
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["config", "nowhere.toml"], "nowhere.toml: no such file"),
        (["train", "--training.step", "3"], "--training.steps"),
        (["tokenizer"], "titan-moe tokenizer train"),
        (["report"], "titan-moe report OUTPUT_DIR"),
        (["doctor", "now"], "takes no arguments"),
        (["tokenizer", "train", "--outptu", "x"], "unknown option --outptu. Did you mean 'output'?"),
        (["generate", "--checkpoint", "x"], "--prompt is missing"),
        (["generate", "--checkpoint", "x", "--prompt", "a", "--temperature", "nan"], "--temperature nan"),
        (["generate", "--checkpoint", "x", "--prompt", "a", "--temperature", "inf"], "must be finite"),
        (["generate", "--checkpoint", "x", "--prompt", "a", "--seed", str(2**65)], "less than 2**63"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, part, capsys):
    ended(2, *argv)
    captured = capsys.readouterr()
    assert captured.err.startswith("titan-moe: error: ") and captured.err.count("\n") == 1 and part in captured.err
    assert captured.out == ""


def test_config_prints_what_the_run_will_use(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsteps = 7\n")
    main(["config", str(path), "--training.seq_len", "32"])
    out = capsys.readouterr().out
    assert "\nsteps = 7\n" in out and "\nseq_len = 32\n" in out


def test_doctor_lists_versions_and_optional_packages(capsys, monkeypatch):
    import importlib

    genuine = importlib.import_module

    def absent(name, *rest):
        # Their import takes seconds; whether they are here is not what is tested.
        if name in ("transformers", "datasets", "deep_ep"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "wandb":
            raise RuntimeError("half installed")
        return genuine(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    main(["doctor"])
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    for name in (
        "python",
        "torch",
        "triton",
        "torchao",
        "transformer-engine",
        "deep_ep",
        "hybridep",
        "pyarrow",
        "matplotlib",
    ):
        assert name in rows
    assert "not installed" in rows["transformers"] and "broken: RuntimeError: half installed" in rows["wandb"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a"), 2, "titan-moe: error: a\n"),
        (DataError("two\nlines"), 1, "titan-moe: error: two lines\n"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ConfigError("a = '" + "x" * 5000 + "': b"), 2, f"error: a = '{'x' * 99}… (5003 characters) …{'x' * 58}': b\n"),
        (ConfigError("x y " * 1000), 2, "… (3999 characters) …"),
        (ValueError("x"), 1, "ValueError: x (--debug.traceback shows where)"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_a_code(error, code, line, capsys):
    with pytest.raises(SystemExit) as end, reported():
        raise error
    err = capsys.readouterr().err
    assert end.value.code == code and line in err and "Traceback" not in err
    if not isinstance(error, KeyboardInterrupt):
        with pytest.raises(SystemExit), reported(show_traceback=True):
            raise error
        assert "Traceback" in capsys.readouterr().err


def test_faults_of_the_program_keep_their_traceback():
    with pytest.raises(AssertionError), reported():
        raise AssertionError("ours")


def test_a_closed_pipe_ends_quietly():
    shell = f"set -o pipefail; {sys.executable} -m titan_moe.cli train --help | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.returncode in (0, 141)


def test_process_count_comes_from_ngpu_or_the_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("NGPU", "3")
    assert process_count() == 3
    for wrong in ("0", "-1", "two"):
        monkeypatch.setenv("NGPU", wrong)
        with pytest.raises(ConfigError, match="NGPU"):
            process_count()
    monkeypatch.delenv("NGPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process_count() == 1
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: a'\necho 'GPU 1: b'\n")
    tool.chmod(0o755)
    assert process_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert process_count() == 1


@pytest.mark.parametrize(("ngpu", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_ranks_get_the_first_signal_and_leave_in_their_own_time(start, ngpu, number):
    process = start(ngpu, "wait")
    for _ in range(ngpu):
        process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    assert all(f"saved by rank {rank}" in out for rank in range(ngpu))
    # One process takes what torch takes by itself.
    threads = None if ngpu == 1 else max(1, len(os.sched_getaffinity(0)) // ngpu)
    assert f"with {threads} threads" in out


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_ranks_are_found_without_proc_too(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in launch.child_processes()
        monkeypatch.setattr(launch, "Path", lambda path: Path("/nowhere"))
        assert child.pid in launch.child_processes()
        child.stdin.close()
    launch.send_signal(signal.SIGTERM, [child.pid])  # gone: nothing happens


CHILD = """
import os, sys, time
sys.platform = sys.argv[1]
from titan_moe.errors import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_process_ends_with_its_parent_on_every_system(platform):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, {platform!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        deadline = time.monotonic() + 30
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(pid)


@pytest.mark.parametrize("ngpu", [1, 2])
def test_no_rank_outlives_a_launcher_that_was_killed(start, ngpu):
    process = start(ngpu, "wait")
    pids = [int(process.stdout.readline().split()[1]) for _ in range(ngpu)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("ngpu", "mode", "code", "last"),
    [
        (1, "killed", 137, "titan-moe: error: Signal 9 (SIGKILL)"),
        (1, "error", 1, "titan-moe: error: line 3 of x.jsonl is broken"),
        (2, "error", 1, "titan-moe: error: rank 1: line 3 of x.jsonl is broken"),
        (2, "lingers", 2, "titan-moe: error: rank 0: too many of them"),
        (2, "killed", 137, "titan-moe: error: rank 1: Signal 9 (SIGKILL)"),
    ],
)
def test_the_last_line_names_the_first_rank_that_failed_and_why(start, ngpu, mode, code, last):
    process = start(ngpu, mode)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.splitlines()[-1].startswith(last) and "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--parallelism.data_parallel_replicate_degree", "3"), "legal data_parallel_replicate_degree: 1, 2."),
        (("--model.override.num_expert", "4"), "Did you mean 'num_experts'?"),
        (("--model.override.top_k", "9"), "top_k = 9 is more than num_experts = 8"),
        (("--training.seq_len", "99999"), "is beyond the model's max_seq_len"),
    ],
)
def test_an_impossible_configuration_shows_once_and_starts_no_rank(start, options, part):
    process = start(2, "ok", *options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1 and part in err and "rank" not in err + out
