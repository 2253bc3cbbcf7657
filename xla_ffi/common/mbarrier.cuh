// Synchronization inside a block on Hopper: mbarriers in shared memory, async-proxy fences, named
// barriers, and the reallocation of registers among warpgroups.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/shared_address.cuh"

namespace jaxunet::cuda {

// An mbarrier in shared memory. A phase completes after as many arrivals as `init` was given, and
// once all announced bytes have been copied. Phases alternate between parity 0 and 1, and the first
// has parity 0: a wait for parity 1 on a fresh barrier returns at once.
struct Barrier {
  uint64_t state;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives and announces that this phase will also receive `bytes` bytes.
  __device__ void arrive_expect(int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Waits until the phase with this parity has completed.
  __device__ void wait(int parity) {
    uint32_t done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, "
          "1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(shared_address(this)), "r"(parity)
          : "memory");
    } while (!done);
  }
};

// Makes initialized barriers visible to the other threads and to TMA. A barrier of all threads must
// follow.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's accesses to shared memory before later ones by wgmma and TMA.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Synchronizes `threads` threads at named barrier `number`, 1 to 15; number 0 is __syncthreads().
__device__ inline void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts this warp's threads at a named barrier, at which `threads` threads arrive or wait in all.
__device__ inline void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Changes the number of registers per thread of this warpgroup (setmaxnreg). All of its warps must
// call it.
template <int kRegisters, bool kIncrease>
__device__ inline void set_registers() {
  if constexpr (kIncrease) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

}  // namespace jaxunet::cuda
