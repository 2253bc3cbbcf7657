// Thread block clusters (compute capability 9.0): the cluster barrier, and access to the shared
// memory of the cluster's other blocks, the peers. Code for other architectures must not call
// `store_peer`, `arrive_peer` or `fence_async_proxy_cluster`: ptxas rejects their instructions
// there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/mbarrier.cuh"

namespace jaxunet::cuda {

// The cluster's barrier, in two halves: after cluster_wait, a thread sees what every thread of the
// cluster wrote before its cluster_arrive. Every thread calls both, one after the other.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
  __trap();
#endif
}

// Arrives without making this thread's writes visible to the others, and so without waiting for
// them. For a barrier that only tells that a block has started or may end.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#else
  __trap();
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __trap();
#endif
}

// Maps `here`, an address in this block's shared memory, to the same place in block `rank` of the
// cluster.
__device__ inline uint32_t peer_address(uint32_t here, int rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
#else
  __trap();
#endif
  return there;
}

// Writes to a peer's shared memory, at an address from `peer_address`. Four words need an address
// that is a multiple of 16 bytes.
__device__ inline void store_peer(uint32_t there, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
__device__ inline void store_peer(uint32_t there, const uint32_t (&words)[4]) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Arrives at the barrier of block `rank` that corresponds to `here` in this block. This thread's
// reads come before it; its writes need not be visible to other blocks, which it would wait for.
__device__ inline void arrive_peer(const Barrier* here, int rank) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(
                   peer_address(shared_address(here), rank))
               : "memory");
}

// fence_async_proxy (mbarrier.cuh) for writes to the shared memory of any block of the cluster.
__device__ inline void fence_async_proxy_cluster() {
  asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
}

}  // namespace jaxunet::cuda
