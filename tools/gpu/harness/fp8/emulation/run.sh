#!/bin/sh
# Builds and runs the emulation (emulate.cc) on a CPU.
#   tools/gpu/harness/fp8/emulation/run.sh [FOLDER]     FOLDER: for the program
# Needs g++ and the headers of the CUDA toolkit ($CUDA_HOME), but no GPU. The exit status is not 0 if
# a check fails.
set -e
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../../../../../xla_ffi" && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
cp "$here"/../kernel.cuh "$here"/../variants.h "$here"/instructions.cuh "$here"/emulate.cc "$folder"
g++ -std=c++17 -O2 -w -U_FORTIFY_SOURCE -fno-strict-aliasing -I "$folder" -I "$sources" \
  -I "${CUDA_HOME:-/usr/local/cuda}/include" "$folder/emulate.cc" -o "$folder/emulate"
"$folder/emulate"
