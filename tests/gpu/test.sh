#!/usr/bin/env bash
# Runs every GPU test in eight workers and prints the summary.
#   tests/gpu/test.sh [PYTEST ARGUMENTS]
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
python3 -m pytest -m gpu -n 8 -q -p no:benchmark "$@"
