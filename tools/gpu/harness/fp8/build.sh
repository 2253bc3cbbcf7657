#!/usr/bin/env bash
# Builds the harness of the FP8 convolution (bench.cu); needs nvcc, but no GPU.
#   tools/gpu/harness/fp8/build.sh FOLDER     makes FOLDER/bench
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../../../../xla_ffi" && pwd)
mkdir -p "$1"
flags=(-std=c++17 -O3 -gencode "arch=compute_90a,code=sm_90a" --threads 0 -I "$sources")
library=() jobs=()
for source in "$sources"/conv3x3/hopper/forward{,_bfloat16}.cu \
  "$sources"/common/{tensor_map,shared_memory}.cc "$here/bench.cu"; do
  object=$1/$(basename "$source").o
  nvcc "${flags[@]}" -c "$source" -o "$object" &
  library+=("$object") jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
nvcc "${flags[@]}" "${library[@]}" -o "$1/bench"
