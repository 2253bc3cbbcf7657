#!/bin/sh
# Builds the harness of GroupNorm's backward kernel (bench.cu); needs nvcc, but no GPU.
#   tools/gpu/harness/gnback/build.sh FOLDER [OLD]     makes FOLDER/bench
# OLD: a checkout whose kernels are the baseline, compiled in another namespace. Its NormGradient
# (group_norm/plan.h) and KernelSet must have the same layout as here. If not given: this one without
# clusters, so that the baseline of large samples is the streaming kernels.
set -e
here=$(cd "$(dirname "$0")" && pwd)
new=$(cd "$here/../../../../xla_ffi" && pwd)
old=$(cd "${2:-$here/../../../..}/xla_ffi" && pwd)
folder=$1
mkdir -p "$folder"
baseline=${2:+-DJAXUNET_BUILT_FOR_SM90A}
flags="-std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a"
compile() { # xla_ffi of a checkout, namespace, prefix of the object file, source
  nvcc $flags $baseline -I "$1" -I "$1/group_norm" -Djaxunet="$2" -c "$1/$4" -o "$folder/$3_$(basename "$4").o"
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
