#!/bin/sh
# Builds the harness: build.sh FOLDER [OLD] makes FOLDER/bench. OLD: a checkout whose kernels, in
# another namespace, are the baseline; without it, this checkout's.
set -e
here=$(cd "$(dirname "$0")" && pwd)
new=$(cd "$here/../../../../xla_ffi" && pwd)
old=$(cd "${2:-$here/../../../..}/xla_ffi" && pwd)
folder=$1
mkdir -p "$folder"
flags="-std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a"
compile() { # checkout's xla_ffi, namespace, prefix, source
  nvcc $flags -I "$1" -I "$1/group_norm" -Djaxunet="$2" -c "$1/$4" -o "$folder/$3_$(basename "$4").o"
}
for file in "$old"/group_norm/*.cu; do
  compile "$old" jaxunet_old old "group_norm/$(basename "$file")"
done
compile "$old" jaxunet_old old common/shared_memory.cc
for file in group_norm/backward_smem_resident.cu group_norm/parameter_gradients.cu \
  common/shared_memory.cc; do
  compile "$new" jaxunet new "$file"
done
nvcc $flags -I "$new" -I "$new/group_norm" --expt-relaxed-constexpr -c "$here/bench.cu" \
  -o "$folder/bench.o"
nvcc $flags -Xcompiler -static-libstdc++ -Xcompiler -static-libgcc "$folder"/*.o -o "$folder/bench"
