// TMA: copies of boxes between global arrays, described by tensor maps, and shared memory.
#pragma once

#include <cuda.h>

#include "common/mbarrier.cuh"

namespace jaxunet::cuda {

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One thread starts a copy of the box whose first element is (c0, c1, ...), innermost dimension
// first. Elements outside of the array are loaded as zeros and not stored. A load counts its bytes
// at the barrier, where `arrive_expect` announces them. After a store, call `tma_store_commit` and
// then wait with `tma_store_wait_read`.
__device__ inline void tma_load(void* to, const CUtensorMap* map, Barrier* barrier, int c0, int c1,
                                int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ inline void tma_load(void* to, const CUtensorMap* map, Barrier* barrier, int c0, int c1,
                                int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Multicasts one load to the blocks of the cluster whose bits are set in `blocks`. Each of them
// receives the box at the place of `to` and counts its bytes at its own copy of `barrier`.
__device__ inline void tma_load_multicast(void* to, const CUtensorMap* map, Barrier* barrier,
                                          int c0, int c1, int c2, int c3, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}
__device__ inline void tma_store(const CUtensorMap* map, const void* from, int c0, int c1, int c2,
                                 int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ inline void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have read their shared memory, so that it may be overwritten.
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace jaxunet::cuda
