#!/bin/sh
# Builds and runs the emulation (emulate.cc) on a CPU.
#   tools/gpu/harness/portable_conv/emulation/run.sh [FOLDER [SOURCES [quick]]]
# FOLDER: for the program. threads.o and emulate.o that are already there are not built again.
# SOURCES: a folder in place of xla_ffi for the multistage kernels; xla_ffi has the other headers.
# quick: only every second case.
# Needs g++ and the headers of the CUDA toolkit ($CUDA_HOME), but no GPU. The exit status is not 0 if
# a check fails.
set -e
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
xla_ffi=$(cd "$here/../../../../../xla_ffi" && pwd)
sources=${2:-$xla_ffi}
mkdir -p "$folder"
flags="-std=c++17 -O2 -w -U_FORTIFY_SOURCE -fno-strict-aliasing -I $here -I $here/.. -I $sources"
flags="$flags -I $xla_ffi -I ${CUDA_HOME:-/usr/local/cuda}/include"
rm -f "$folder/forward.o" "$folder/weight_gradient.o" "$folder/emulate"
for kernel in forward weight_gradient; do
  g++ $flags -include math.h -x c++ -c "$sources/conv3x3/portable/multistage_$kernel.cu" \
    -o "$folder/$kernel.o" &
done
for source in threads emulate; do
  [ -e "$folder/$source.o" ] || g++ $flags -c "$here/$source.cc" -o "$folder/$source.o"
done
wait
g++ "$folder"/*.o -o "$folder/emulate"
"$folder/emulate" $3
