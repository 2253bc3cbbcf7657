// What the flash kernels ask of the hardware beyond conv3x3/warp_instructions.cuh: the fast exponential.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxunet::cuda {

// 2^x to about 22 bits; 0 at -infinity.
__device__ inline float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace jaxunet::cuda
