# Sourced by the scripts in the top folder, with ROOT set. Sets PYTHON to an interpreter that has what the run needs:
# the current one if titan_moe is installed in it, else .venv in the checkout, made and repaired here.

VENV="$ROOT/.venv"
LOCK="$ROOT/requirements.lock"
INSTALLING="$VENV/.installing"
STAMP="$VENV/.installed"

# has_all INTERPRETER: whether titan_moe, torch and the packages named in NEEDS can be found, without importing them.
# -P keeps the current folder off the path: titan_moe lies in it but its dependencies may not.
has_all() {
    "$1" -P -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))' \
        titan_moe torch torchdata safetensors tokenizers tyro rich tensorboard ${NEEDS:-} 2>/dev/null
}

fingerprint() {
    cat "$LOCK" "$ROOT/pyproject.toml" | cksum
}

venv_is_ready() {
    [ -x "$VENV/bin/python" ] && [ ! -e "$INSTALLING" ] || return 1
    if [ -e "$STAMP" ]; then
        [ "$(cat "$STAMP")" = "$(fingerprint)" ] && "$VENV/bin/python" -c '' 2>/dev/null
    else
        has_all "$VENV/bin/python"  # made by hand
    fi
}

base_interpreter() {
    local found=""
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        command -v "$name" >/dev/null || continue
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
        found="$found $(command -v "$name") ($("$name" --version 2>&1))"
    done
    echo "setup: needs Python 3.11 or newer with the venv module; found:${found:- none}." >&2
    echo "setup: install it (on Debian: python3 and python3-venv) or activate an environment that has titan_moe." >&2
    return 1
}

pip_install() {
    "$VENV/bin/python" -m pip install $quiet "$@"
}

install_torch() {
    local version
    version="$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$LOCK")"
    if "$VENV/bin/python" -c "
import importlib.metadata as m, sys
sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null; then
        return
    fi
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        pip_install "torch==$version"
    else
        # The CPU build is a tenth of the size. Not every index has it; uv knows where torch publishes it.
        pip_install "torch==$version+cpu" 2>/dev/null ||
            { pip_install uv &&
                "$VENV/bin/uv" pip install $quiet --python "$VENV/bin/python" --torch-backend=cpu "torch==$version"; } ||
            pip_install "torch==$version"
    fi
}

make_venv() {
    local base quiet="--quiet"
    # A terminal gets the installers' own progress.
    [ ! -t 2 ] || quiet=""
    base="$(base_interpreter)" || return 1
    echo "setup: installing into $VENV, which takes some minutes" >&2
    if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$base" -m venv --clear "$VENV" || return 1
    fi
    touch "$INSTALLING" && rm -f "$STAMP" || return 1
    echo "setup: 1 of 3, torch: 200 MB, on a GPU 3 GB …" >&2
    install_torch || return 1
    echo "setup: 2 of 3, the packages of requirements.lock …" >&2
    pip_install -r "$LOCK" || return 1
    echo "setup: 3 of 3, titan_moe …" >&2
    pip_install --no-deps --editable "$ROOT" || return 1
    fingerprint >"$STAMP" && rm -f "$INSTALLING"
}

make_venv_once() {
    # Of two scripts started together, one installs and the other waits.
    (
        if command -v flock >/dev/null; then
            flock 9
        fi
        venv_is_ready || make_venv >&2
    ) 9>"$ROOT/.venv.lock" || {
        echo "setup: the installation failed; the next run continues it." >&2
        return 1
    }
}

PYTHON=""
for name in python python3; do
    if command -v "$name" >/dev/null && has_all "$(command -v "$name")"; then
        PYTHON="$(command -v "$name")"
        break
    fi
done
if [ -z "$PYTHON" ]; then
    venv_is_ready || make_venv_once || exit 1
    PYTHON="$VENV/bin/python"
fi
# This checkout's code, wherever the packages are, and from any folder.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
