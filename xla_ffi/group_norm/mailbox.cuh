// Pairs of numbers, such as sums, that the blocks of a cluster send to each other's shared memory
// with st.async (compute capability 9.0). The receiver waits only for these bytes. A cluster
// barrier with release and acquire would also wait until everything that the blocks wrote to global
// memory has arrived.
#pragma once

#include "instructions.cuh"

namespace jaxunet::cuda {

// The memory in which a block receives the pairs of all blocks of its cluster, once. All threads of
// the cluster call open, and wait_open before they send. All threads of a receiver call wait_full.
// A block may exit once it has sent and received everything, because nothing else is sent to it.
struct Mailbox {
  Barrier* full;  // completes when all pairs have arrived
  float2* slots;

  __device__ void open(bool receiver) const {
#if __CUDA_ARCH__ >= 900
    if (receiver && threadIdx.x == 0) {
      full->init(1);
      fence_barrier_init();
    }
    cluster_arrive_relaxed();  // fence_barrier_init has ordered the initialization
#else
    __trap();
#endif
  }
  __device__ void wait_open() const { cluster_wait(); }
  // Sends `value` to a slot of block `rank`.
  __device__ void send(int rank, int slot, float2 value) const {
#if __CUDA_ARCH__ >= 900
    const uint64_t bits = static_cast<uint64_t>(__float_as_uint(value.y)) << 32 |
                          static_cast<uint64_t>(__float_as_uint(value.x));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                     peer_address(shared_address(slots + slot), rank)),
                 "l"(bits), "r"(peer_address(shared_address(full), rank))
                 : "memory");
#else
    __trap();
#endif
  }
  // Waits until `bytes` bytes of pairs have arrived. They may arrive before thread 0 announces
  // them, because `full` cannot complete until it has. Thread 0 does so here and not in open,
  // because racecheck needs a barrier between init and the arrival.
  __device__ void wait_full(int bytes) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) full->arrive_expect(bytes);
    uint32_t done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], "
          "0;\nselp.b32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(shared_address(full))
          : "memory");
    } while (!done);
#else
    __trap();
#endif
  }
};

}  // namespace jaxunet::cuda
