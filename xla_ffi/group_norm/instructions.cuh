// What only nvcc can read: launches, copies to shared memory in the background (compute capability 8.0 and later), and
// the shared memory of a cluster's blocks (9.0).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxunet::cuda {

// Blocks with the same y and z form a cluster, where there are several and it is asked for.
template <class Plan>
cudaError_t launch(void (*kernel)(Plan), dim3 grid, int threads, int64_t shared, cudaStream_t stream, const Plan& plan,
                   bool cluster_of_x = true) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = grid.x;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = grid;
  how.blockDim = dim3(static_cast<unsigned>(threads));
  how.dynamicSmemBytes = static_cast<size_t>(shared);
  how.stream = stream;
  how.attrs = &cluster;
  how.numAttrs = cluster_of_x && grid.x > 1 ? 1 : 0;
  error = cudaLaunchKernelEx(&how, kernel, plan);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_plainly(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream,
                           const Arguments&... arguments) {
  kernel<<<grid, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

// The shared memory whose size the launch names.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(16) char jaxunet_norm_memory[];
  return jaxunet_norm_memory;
}

__device__ inline uint32_t shared_address_of(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; both addresses are multiples of 16.
__device__ inline void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address_of(to)), "l"(from) : "memory");
}

// Starts to bring a line of global memory to the L2 cache.
__device__ inline void to_cache(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// The thread's copies since the last call form a group.
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All of this thread's groups but the last kPending are copied.
template <int kPending>
__device__ inline void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// All threads of all blocks of the cluster arrive, and go on once all have: what they wrote before is seen after.
__device__ inline void arrive_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
  __trap();
#endif
}

__device__ inline void wait_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __trap();
#endif
}

// What a block of the cluster has where this one has `here`.
__device__ inline float4 of_block(const float4* here, int rank) {
  float4 found{};
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address_of(here)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
               : "r"(there)
               : "memory");
#else
  __trap();
#endif
  return found;
}

}  // namespace jaxunet::cuda
