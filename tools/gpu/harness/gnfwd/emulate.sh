# Builds and runs emulate.cc: GroupNorm's forward_register_resident.cu and statistics.cu on a CPU.
#   sh tools/gpu/harness/gnfwd/emulate.sh FOLDER     FOLDER: for the program
# Takes two minutes. Needs python3, g++ and the headers of the CUDA toolkit ($CUDA_INCLUDE), but no
# GPU. The exit status is not 0 if a check fails.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../../../xla_ffi
mkdir -p "$1" && cd "$1"
python3 "$here/make.py" "$source" .
cp "$here/emu.h" "$here/emulate.cc" .
g++ -std=c++17 -O2 -w -I. -I "$source" \
  -I "${CUDA_INCLUDE:-/usr/local/cuda/targets/x86_64-linux/include}" emulate.cc -o emulate
./emulate
