// What the flash kernels ask of the hardware beyond conv3x3/warp_instructions.cuh: asynchronous copies to shared memory
// (compute capability 8.0 and later) and the fast exponential.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxunet::cuda {

// 16 bytes from global to shared memory, or 16 zero bytes; both addresses are multiples of 16.
__device__ inline void copy_async(void* to, const void* from, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// This thread's copies are done; those of others are after the next barrier.
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 2^x to about 22 bits; 0 at -infinity.
__device__ inline float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace jaxunet::cuda
