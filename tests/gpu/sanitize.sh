#!/usr/bin/env bash
# Runs the small, awkward cases of every CUDA kernel under compute-sanitizer.
#   tests/gpu/sanitize.sh [TOOL ...]      default: memcheck racecheck
# XLA's autotuner is off: its own candidates make racecheck fail before a kernel of ours has run.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_MEM_FRACTION=0.03
export XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"
status=0
for tool in ${*:-memcheck racecheck}; do
  compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 --target-processes all \
    --kernel-name-exclude kernel_substring=xla \
    python3 -m pytest -q -n 0 -p no:benchmark -p no:cacheprovider xla_ffi \
    -k '(awkward or (hopper_shapes and (b1- or b2- or b3- or b5-))) and not float32' 2>&1 | tail -40
  code=${PIPESTATUS[0]}
  echo "$tool: exit status $code"
  [ "$code" -eq 0 ] || status=1
done
exit $status
