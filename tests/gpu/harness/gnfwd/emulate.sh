# Runs GroupNorm's register_resident and statistics kernels on the CPU, each thread a fiber, and
# checks results, barriers, alignment and bounds of shared memory against float64: two minutes.
#
#   tests/gpu/harness/gnfwd/emulate.sh FOLDER
#
# Needs g++ and the headers of the CUDA toolkit ($CUDA_INCLUDE).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../../../xla_ffi
mkdir -p "$1" && cd "$1"
python3 "$here/make.py" "$source" .
cp "$here/emu.h" "$here/emulate.cc" .
g++ -std=c++17 -O2 -w -I. -I "$source" \
  -I "${CUDA_INCLUDE:-/usr/local/cuda/targets/x86_64-linux/include}" emulate.cc -o emulate
./emulate
