#!/usr/bin/env bash
# Train: ./run_train.sh --job.config_file train_configs/debug.toml [--section.key value …]
# NGPU=n sets the number of processes that torchrun starts (default: the GPUs present, else 1). --help lists the keys.
set -eu
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/scripts/setup_env.sh"
exec "$PYTHON" -m titan_moe.cli train "$@"
