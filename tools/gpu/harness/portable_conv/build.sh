#!/bin/bash
# Builds the harness of the multistage kernels (README.md); needs nvcc, but no GPU.
#   tools/gpu/harness/portable_conv/build.sh FOLDER     makes FOLDER/bench and FOLDER/run.sh
# Prints registers and spilled bytes of the multistage kernels; fails if one spills.
# $ARCHITECTURES: compute capabilities to compile for, "80 89 90a" by default.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../../../../xla_ffi" && pwd)
mkdir -p "$1"
flags="-std=c++17 -O3 --expt-relaxed-constexpr -I $here -I $sources"
for architecture in ${ARCHITECTURES:-80 89 90a}; do
  flags="$flags -gencode arch=compute_$architecture,code=sm_$architecture"
done
for source in conv3x3/portable/implicit_gemm_{forward,weight_gradient}.cu \
  conv3x3/split_k_reduce.cu common/shared_memory.cc; do
  nvcc $flags -c "$sources/$source" -o "$1/$(basename "$source").o"
done
bench=$1/bench
for kernel in forward weight_gradient; do
  nvcc $flags -Xptxas -v -c "$sources/conv3x3/portable/multistage_$kernel.cu" -o "$bench.$kernel.o" \
    >"$bench.$kernel.log" 2>&1 || { grep error "$bench.$kernel.log"; exit 1; }
done
python3 "$here/registers.py" "$bench".{forward,weight_gradient}.log
nvcc $flags -c "$here/bench.cu" -o "$bench.o"
nvcc $flags "$bench.o" "$bench".{forward,weight_gradient}.o "$1"/*.cu.o "$1"/*.cc.o -o "$bench"
cp "$here/run.sh" "$1/"
