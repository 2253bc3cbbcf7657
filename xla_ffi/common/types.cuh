// float32, float16 and bfloat16 in registers: conversions, and vectors of adjacent elements that
// one instruction loads or stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxunet::cuda {

// Conversions to and from float32.
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Adjacent elements, at most 16 bytes, that one instruction loads or stores. The address is a
// multiple of their size.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) AlignedArray {
  T at[kWidth];
};

// Eight adjacent elements: 16 bytes in 16-bit types; 32 bytes, and two instructions, in float32.
template <class T>
struct alignas(16) Eight {
  T at[8];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = narrow<T>(0.0f);
  }
  // `from` and `to` are aligned to 16 bytes.
  __device__ void load(const T* from) {
    const auto* source = reinterpret_cast<const uint4*>(from);
    auto* target = reinterpret_cast<uint4*>(at);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) target[i] = source[i];
  }
  __device__ void store(T* to) const {
    auto* target = reinterpret_cast<uint4*>(to);
    const auto* source = reinterpret_cast<const uint4*>(at);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) target[i] = source[i];
  }
};

// x · sigmoid(x), to float32 precision.
__device__ inline float silu_exact(float x) { return x / (1.0f + expf(-x)); }

}  // namespace jaxunet::cuda
