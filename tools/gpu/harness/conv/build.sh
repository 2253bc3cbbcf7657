#!/usr/bin/env bash
# Builds the harness of the Hopper convolution (bench.cu); needs nvcc, but no GPU.
#   tools/gpu/harness/conv/build.sh FOLDER     makes FOLDER/bench
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../../../../xla_ffi" && pwd)
mkdir -p "$1"
nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --threads 0 -I "$sources" \
  "$here/bench.cu" "$sources"/conv3x3/hopper/forward{,_bfloat16,_float16,_wide}.cu \
  "$sources"/common/{tensor_map,shared_memory}.cc -o "$1/bench"
