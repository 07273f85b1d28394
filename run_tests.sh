#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments]. --slow runs the slow tests instead of the quick ones.
set -eu
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
NEEDS="pytest transformers pyarrow"
. "$ROOT/scripts/setup_env.sh"
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
