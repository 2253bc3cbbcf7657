#!/usr/bin/env bash
# Builds the harness of the Hopper attention kernels (bench.cu); needs nvcc, but no GPU.
#   tools/gpu/harness/attn/build.sh FOLDER     makes FOLDER/bench and FOLDER/run.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../../../../xla_ffi" && pwd)
mkdir -p "$1"
nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I "$sources" -I "$here" \
  "$here/bench.cu" "$sources"/attention/{,hopper/}*float16.cu \
  "$sources"/common/{tensor_map,shared_memory}.cc -o "$1/bench"
cp "$here/run.sh" "$1/"
