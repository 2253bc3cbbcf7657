// cp.async in groups, compute capability 8.0 and later; to be merged into warp_instructions.cuh.
#pragma once

#include "common/warp_instructions.cuh"

namespace jaxunet::cuda {

// The address that ldmatrix and cp.async take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, or writes 16 zero bytes. Both addresses are
// multiples of 16; `from` is valid either way. kThroughL1: the L1 cache keeps the bytes, which the
// next taps read again.
template <bool kThroughL1>
__device__ inline void cp_async_16(uint32_t to, const void* from, bool there) {
  if constexpr (kThroughL1) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
  }
}

// Ends this thread's group of copies, which may be empty.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last kPending groups of this thread are incomplete.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxunet::cuda
