#!/usr/bin/env bash
# Runs every GPU test, in eight workers for each GPU; prints failures as they happen, and the
# summary.
#   tools/gpu/test.sh [PYTEST ARGUMENTS]
# Each worker has one of the GPUs, all or those of CUDA_VISIBLE_DEVICES. If there are several, and
# without arguments, a second pytest repeats the tests of training with all of them visible.
# JAXUNET_KERNELS=portable (or ada) in the environment tests the portable kernels (docs/cuda.md).
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.:tools/gpu${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd ,)}
export CUDA_VISIBLE_DEVICES
IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
((${#gpus[@]})) || { echo 'error: expected an NVIDIA GPU, found none'; exit 2; }
pytest=(python3 -m pytest -m gpu -q -p no:benchmark -p show_failures)
failed=0
"${pytest[@]}" -n $((8 * ${#gpus[@]})) -p one_gpu_each "$@" || failed=$?
if ((${#gpus[@]} > 1 && $# == 0)); then
  "${pytest[@]}" -n 6 tests/gpu/test_gpu.py tests/gpu/test_processes.py -k every_gpu || failed=$?
fi
exit $failed
