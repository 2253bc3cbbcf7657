// Shared by the harnesses: the types of arrays, and normal random numbers by position, so that any
// thread can draw any of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// Calls a function with a number of a type: 0: float, 1: __half, 2: __nv_bfloat16.
template <class F>
auto by_type(int type, const F& f) {
  return type == 0 ? f(float()) : type == 1 ? f(__half()) : f(__nv_bfloat16());
}

// The finalizer of splitmix64.
__device__ inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Fills an array of float, __half or __nv_bfloat16 (Box-Muller).
template <class T>
__global__ void fill_normal(T* to, int64_t count, uint64_t seed, float mean, float deviation) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = mix(seed * 0x1000003ull + static_cast<uint64_t>(i));
    const float u = static_cast<float>((bits & 0xffffff) + 1) / 16777217.0f,
                v = static_cast<float>(bits >> 40) / 16777216.0f;
    to[i] = static_cast<T>(mean + deviation * sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}
