// Kernel launches, and PTX instructions for which CUDA C++ has no function: asynchronous copies to
// shared memory (cp.async, compute capability 8.0 and later), and reads of a peer's shared memory
// in a cluster (9.0).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/shared_memory.h"
#include "common/warp_instructions.cuh"

namespace jaxunet::cuda {

// Launches `kernel` with `smem_bytes` of dynamic shared memory.
template <class Plan>
cudaError_t launch_single_blocks(void (*kernel)(Plan), dim3 grid, int threads, int64_t smem_bytes,
                                 cudaStream_t stream, const Plan& plan) {
  const int bytes = static_cast<int>(smem_bytes);
  const cudaError_t error = allow_shared_memory(kernel, bytes);
  return error == cudaSuccess ? launch(kernel, grid, threads, bytes, stream, plan) : error;
}

// The same, but all blocks with the same y and z form a cluster, if there are several.
template <class Plan>
cudaError_t launch_row_clusters(void (*kernel)(Plan), dim3 grid, int threads, int64_t smem_bytes,
                                cudaStream_t stream, const Plan& plan) {
  if (grid.x == 1) return launch_single_blocks(kernel, grid, threads, smem_bytes, stream, plan);
  const int bytes = static_cast<int>(smem_bytes);
  const cudaError_t error = allow_shared_memory(kernel, bytes);
  return error == cudaSuccess
             ? launch_clusters(kernel, grid, static_cast<int>(grid.x), threads, bytes, stream, plan)
             : error;
}

// The dynamic shared memory of the block.
__device__ inline char* dynamic_smem() {
  extern __shared__ __align__(16) char jaxunet_norm_memory[];
  return jaxunet_norm_memory;
}

// Starts to copy 16 bytes from global to shared memory; both addresses are multiples of 16.
__device__ inline void cp_async_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Starts to load a line of global memory into the L2 cache.
__device__ inline void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Reads the shared memory of block `rank` of the cluster, at the same place as `here` in this
// block.
__device__ inline float4 read_peer(const float4* here, int rank) {
  float4 found{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
               : "r"(peer_address(shared_address(here), rank))
               : "memory");
#else
  __trap();
#endif
  return found;
}

}  // namespace jaxunet::cuda
