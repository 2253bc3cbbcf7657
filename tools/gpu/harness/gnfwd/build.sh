# Builds the harness of GroupNorm's forward kernels (bench.cu); needs nvcc, but no GPU.
#   sh tools/gpu/harness/gnfwd/build.sh OLD FOLDER     makes FOLDER/bench
# OLD: a checkout whose kernels are the baseline, compiled in another namespace; may be this one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
old=$(cd "$1" && pwd)/xla_ffi new=$here/../../../../xla_ffi
mkdir -p "$2" && cd "$2"
flags="-std=c++17 -O3 -DJAXUNET_BUILT_FOR_SM90A -gencode arch=compute_90a,code=sm_90a -I $here"
as_old="-I $old -Djaxunet=jaxunet_old"
for file in "$old"/group_norm/*.cu; do
  nvcc $flags $as_old -c "$file" -o "old_$(basename "$file").o"
done
for file in "$new"/group_norm/*.cu; do
  nvcc $flags -I "$new" -c "$file" -o "$(basename "$file").o"
done
nvcc $flags $as_old -c "$old/common/shared_memory.cc" -o old_shared_memory.o
nvcc $flags -I "$new" -c "$new/common/shared_memory.cc" -o shared_memory.o
nvcc $flags $as_old -DENTRY=run_old -c "$here/adapter.cu" -o old_adapter.o
nvcc $flags -I "$new" -DNEW -DENTRY=run_new -c "$here/adapter.cu" -o adapter.o
nvcc $flags -c "$here/bench.cu" -o bench.o
nvcc $flags ./*.o -o bench
