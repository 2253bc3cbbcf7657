#!/bin/sh
# Builds and runs the emulation: emulation/run.sh [FOLDER [KERNELS [quick]]]. KERNELS: a copy of
# this harness whose kernels to run. Needs g++ and CUDA's headers ($CUDA_HOME), no GPU.
set -e
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
kernels=${2:-$here/..}
mkdir -p "$folder"
flags="-std=c++17 -O2 -w -U_FORTIFY_SOURCE -fno-strict-aliasing -I $here -I $kernels -I $here/.."
flags="$flags -I $here/../../../../../xla_ffi -I ${CUDA_HOME:-/usr/local/cuda}/include"
rm -f "$folder/forward.o" "$folder/weight_gradient.o" "$folder/emulate"
for kernel in forward weight_gradient; do
  g++ $flags -include math.h -x c++ -c "$kernels/conv3x3/portable/multistage_$kernel.cu" \
    -o "$folder/$kernel.o" &
done
for source in threads emulate; do
  [ -e "$folder/$source.o" ] || g++ $flags -c "$here/$source.cc" -o "$folder/$source.o"
done
wait
g++ "$folder"/*.o -o "$folder/emulate"
"$folder/emulate" $3
