"""run_train.sh, run_tests.sh and .ci/run in a copy of the checkout, with a stand-in for Python that logs its calls."""

import os
import pty
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("run_train.sh", "run_tests.sh", ".ci/run")

PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    *find_spec*) case "$0" in */.venv/*) exit "${VENV_HAS_ALL:-1}" ;; *) exit "${HAS_ALL:-1}" ;; esac ;;
    *version_info*) exit "${TOO_OLD:-0}" ;;
    --version) echo "Python 3.9.2" ;;
    *metadata*) exit 1 ;;
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && cp "$0" "$4/bin/uv" ;;
    *+cpu) exit "${NO_CPU_BUILD:-0}" ;;
    *requirements.lock) sleep "${SLOW:-0}"; exit "${LOCK_FAILS:-0}" ;;
    *titan_moe.cli*) exit 7 ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path):
    """``clone(script, **environment) -> (exit code, stderr, calls)``; calls leave out look-ups."""
    root, tools, log = tmp_path / "a clone", tmp_path / "bin", tmp_path / "log"
    for name in (*SCRIPTS, "scripts/setup_env.sh", "requirements.lock", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    tools.mkdir()
    for name in (
        "bash",
        "sh",
        "cat",
        "cksum",
        "sed",
        "grep",
        "dirname",
        "flock",
        "mkdir",
        "cp",
        "rm",
        "touch",
        "sleep",
    ):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    (tools / "python3").write_text(PYTHON)
    (tools / "python3").chmod(0o755)

    def popen(
        script: str = "run_train.sh", *argv: str, stderr: int = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [root / script, *argv],
            env={"PATH": str(tools), "LOG": str(log), **environment},
            stderr=stderr,
            text=True,
        )

    def run(script: str = "run_train.sh", *argv: str, **environment: str) -> tuple[int, str, list[str]]:
        log.write_text("")
        process = popen(script, *argv, **environment)
        err = process.communicate(timeout=60)[1]
        return process.returncode, err, calls()

    def calls() -> list[str]:
        return [line for line in log.read_text().splitlines() if line.startswith("-m ") and "--version" not in line]

    run.root, run.tools, run.popen, run.calls = root, tools, popen, calls
    return run


def torch_pin() -> str:
    return next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))


def test_a_fresh_clone_installs_torch_first_then_the_lock_and_passes_the_exit_code(clone):
    code, err, calls = clone("run_train.sh", "--a", "b c")
    assert code == 7
    assert all(line.startswith("setup: ") for line in err.splitlines()) and "setup: installing into" in err
    assert calls == [
        f"-m venv --clear {clone.root}/.venv",
        f"-m pip install --quiet {torch_pin()}+cpu",
        f"-m pip install --quiet -r {clone.root}/requirements.lock",
        f"-m pip install --quiet --no-deps --editable {clone.root}",
        "-m titan_moe.cli train --a b c",
    ]


def test_a_terminal_sees_the_installers_progress(clone):
    ours, theirs = pty.openpty()
    process = clone.popen(stderr=theirs)
    os.close(theirs)
    assert process.wait(timeout=60) == 7
    assert b"setup: 3 of 3" in os.read(ours, 1 << 16)
    os.close(ours)
    assert f"-m pip install -r {clone.root}/requirements.lock" in clone.calls()


def test_a_second_run_installs_nothing_in_under_a_second(clone):
    clone()
    start = time.perf_counter()
    code, err, calls = clone()
    assert (code, err, calls) == (7, "", ["-m titan_moe.cli train"])
    # The limit is 3 s with a real interpreter, whose one look-up takes about 0.1 s.
    assert time.perf_counter() - start < 1


def test_a_changed_lock_installs_again_without_starting_over(clone):
    clone()
    with (clone.root / "requirements.lock").open("a") as lock:
        lock.write("extra==1\n")
    calls = clone()[2]
    assert not any("venv --clear" in call for call in calls)
    assert any(call.endswith("requirements.lock") for call in calls)
    assert clone()[2] == ["-m titan_moe.cli train"]


def test_an_interrupted_installation_is_repaired(clone):
    code, err, calls = clone(LOCK_FAILS="1")
    assert code == 1 and "the next run continues it" in err
    assert not any("titan_moe.cli" in call for call in calls)
    # Everything can be found by now, but the last installation did not end.
    code, _, calls = clone(VENV_HAS_ALL="0")
    assert code == 7 and any(call.endswith("requirements.lock") for call in calls)
    # Killed before pip was there.
    shutil.rmtree(clone.root / ".venv")
    (clone.root / ".venv/bin").mkdir(parents=True)
    assert any("venv --clear" in call for call in clone()[2])


def test_two_first_runs_at_once_install_once(clone):
    processes = [clone.popen(SLOW="0.5") for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [7, 7]
    calls = clone.calls()
    assert (
        sum("venv --clear" in call for call in calls) == 1
        and sum(call.endswith("requirements.lock") for call in calls) == 1
    )
    assert calls.count("-m titan_moe.cli train") == 2


def test_an_interpreter_or_venv_that_has_everything_is_used_as_it_is(clone):
    assert clone(HAS_ALL="0")[1:] == ("", ["-m titan_moe.cli train"])
    assert not (clone.root / ".venv").exists()
    (clone.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone.tools / "python3", clone.root / ".venv/bin/python")
    assert clone(VENV_HAS_ALL="0")[1:] == ("", ["-m titan_moe.cli train"])


def test_an_old_python_is_refused_in_words(clone):
    code, err, calls = clone(TOO_OLD="1")
    assert code == 1 and calls == []
    assert "needs Python 3.11 or newer" in err and "Python 3.9.2" in err


def test_without_a_cpu_build_on_the_index_uv_finds_one(clone):
    clone(NO_CPU_BUILD="1")
    calls = (clone.root.parent / "log").read_text().splitlines()
    assert "-m pip install --quiet uv" in calls
    assert f"pip install --quiet --python {clone.root}/.venv/bin/python --torch-backend=cpu {torch_pin()}" in calls


def test_with_a_gpu_the_cuda_build_is_installed(clone):
    (clone.tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: some'\n")
    (clone.tools / "nvidia-smi").chmod(0o755)
    calls = clone()[2]
    assert f"-m pip install --quiet {torch_pin()}" in calls and not any("+cpu" in call for call in calls)


def test_the_tests_and_ci_run_in_the_same_environment(clone):
    assert clone("run_tests.sh", "-k", "x y")[2][-1] == "-m pytest -k x y"
    calls = clone(".ci/run")[2]
    assert calls == ["-m ruff check .", "-m ruff format --check .", "-m pytest", "-m pytest --slow"]


def test_the_scripts_train_from_any_folder_and_show_errors_in_one_line(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [ROOT / "run_train.sh", "--training.step", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--training.steps" in done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, "scripts/setup_env.sh", "multinode.slurm"])
def test_shell_files_parse(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_the_lock_covers_every_requirement_and_names_no_build():
    locked = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.partition(";")[0].strip().split("==")
            assert "+" not in version
            locked[name.lower().replace("_", "-")] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        assert requirement.partition(";")[0].partition(">")[0].strip() in locked
