// Approximate functions that the special function units (SFUs) compute.
#pragma once

namespace jaxunet::cuda {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;  // exp(x) = 2^(kLog2e x)

// 2^x to about 22 bits; 0 at -infinity.
__device__ inline float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// 1 / x to about 22 bits.
__device__ inline float reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// tanh to about 11 bits.
__device__ inline float fast_tanh(float x) {
  float out;
  asm("tanh.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace jaxunet::cuda
