#!/usr/bin/env bash
# Runs every GPU test in eight workers; prints failures as they happen, and the summary.
#   tests/gpu/test.sh [PYTEST ARGUMENTS]
# JAXUNET_KERNELS=portable (or ada) in the environment tests the portable kernels (docs/cuda.md).
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.:tests/gpu${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
python3 -m pytest -m gpu -n 8 -q -p no:benchmark -p show_failures "$@"
