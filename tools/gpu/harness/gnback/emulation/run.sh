#!/bin/sh
# Builds and runs emulate.cc on a CPU: all cases, then few under ThreadSanitizer.
#   tools/gpu/harness/gnback/emulation/run.sh [FOLDER]     FOLDER: for the program
# Needs g++ with C++20 and the headers of the CUDA toolkit ($CUDA_HOME), but no GPU. The exit status
# is not 0 if a check fails.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../../.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder/common" "$folder/group_norm"
cp "$root"/xla_ffi/group_norm/*.h "$root"/xla_ffi/group_norm/*.cuh "$folder/group_norm"
cp "$here/instructions.cuh" "$here/mailbox.cuh" "$here/emulate.cc" "$folder/group_norm"
cp "$here/special_functions.cuh" "$folder/common"
cp "$root/xla_ffi/group_norm/backward_smem_resident.cu" "$folder/group_norm/kernel.cc"
include=${CUDA_HOME:-/usr/local/cuda}/include
for flags in "-O1" "-O1 -fsanitize=thread"; do
  g++ -std=c++20 $flags -fno-strict-aliasing -I "$folder" -I "$folder/group_norm" -I "$root/xla_ffi" \
    -I "$include" "$folder/group_norm/emulate.cc" -o "$folder/emulate" -pthread
  case $flags in *thread*) short=short ;; *) short= ;; esac
  setarch -R "$folder/emulate" $short
done
