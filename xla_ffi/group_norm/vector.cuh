// Shared by all GroupNorm kernels: vectors of channels and their conversion to float32, the
// sigmoid, and the addresses of channels in a tensor of several parts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/fast_silu.cuh"
#include "common/special_functions.cuh"
#include "common/types.cuh"
#include "instructions.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// Converts two 16-bit numbers to and from float32.
__device__ inline float2 wide(__half2 x) { return __half22float2(x); }
__device__ inline float2 wide(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline void narrow(float x, float y, __half2* to) { *to = __floats2half2_rn(x, y); }
__device__ inline void narrow(float x, float y, __nv_bfloat162* to) {
  *to = __floats2bfloat162_rn(x, y);
}

template <class T>
struct PairOf {};
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// V adjacent channels of one pixel: 16 bytes, or one channel if some part's channels are not a
// multiple of that.
template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  static constexpr bool kPairs = sizeof(T) == 2 && V % 2 == 0;
  T values[V];

  __device__ void to_floats(float (&to)[V]) const {
    if constexpr (kPairs) {
      const auto* const pairs = reinterpret_cast<const typename PairOf<T>::Type*>(values);
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        const float2 two = wide(pairs[i]);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) to[i] = wide(values[i]);
    }
  }
  __device__ void from_floats(const float (&from)[V]) {
    if constexpr (kPairs) {
      auto* const pairs = reinterpret_cast<typename PairOf<T>::Type*>(values);
#pragma unroll
      for (int i = 0; i < V / 2; ++i) narrow(from[2 * i], from[2 * i + 1], &pairs[i]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = narrow<T>(from[i]);
    }
  }
};

// Loads a vector that nobody writes while the kernel runs, so that the compiler may move the load
// ahead of a store.
template <class T, int V>
__device__ Vector<T, V> load_read_only(const Vector<T, V>* from) {
  Vector<T, V> found;
  if constexpr (V * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(found.values) = __ldg(reinterpret_cast<const uint4*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) found.values[i] = __ldg(from->values + i);
  }
  return found;
}

// Loads V floats, one per channel of a vector; `from` is aligned for such vectors.
template <int V>
__device__ void load_floats(const float* from, float (&to)[V]) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = from[i];
  }
}

// 1 / (1 + exp(-z)). Rounding to 16 bits hides the errors of the approximate exponential and
// reciprocal.
template <class T>
__device__ float sigmoid(float z) {
  if constexpr (sizeof(T) == 2) return reciprocal(1.0f + power_of_two(-kLog2e * z));
  return 1.0f / (1.0f + expf(-z));
}

// SiLU, given kSiluScale * z. Rounding to bfloat16 hides most of the error of fast_silu
// (conv3x3/activation.cuh).
template <class T>
constexpr bool kFastSilu = std::is_same_v<T, __nv_bfloat16>;
template <class T>
constexpr float kSiluScale = kFastSilu<T> ? 0.5f : 1.0f;
template <class T>
__device__ float silu(float scaled) {
  if constexpr (kFastSilu<T>) return fast_silu(scaled);
  return scaled * sigmoid<T>(scaled);
}

// float32 numbers are centred before they are summed: forward by a pivot, the first number of their
// group, and backward by the mean. So a large mean costs no precision. 16-bit numbers need no
// pivot: their mean is at most a few hundred standard deviations, for which float32 sums have bits
// to spare.
template <class T>
constexpr bool kUsesPivot = sizeof(T) == 4;

// `Parts` in the form that a kernel takes: the parts of a tensor along its channels.
struct TensorParts {
  int count;
  char* data[kMaxParts];
  int channels[kMaxParts];
};

inline TensorParts tensor_parts(const Parts& parts) {
  TensorParts to{parts.count, {}, {}};
  for (int i = 0; i < parts.count; ++i) {
    to.data[i] = static_cast<char*>(parts.data[i]);
    to.channels[i] = static_cast<int>(parts.channels[i]);
  }
  return to;
}

// Returns the address of a channel in the first pixel of a sample. `stride`: elements from one
// pixel to the next: the number of channels of the part with this channel.
template <class T>
__device__ T* find_channel(const TensorParts& from, int channel, int64_t sample, int pixels,
                           int* stride) {
  int first = 0, part = 0;
#pragma unroll 1
  while (part + 1 < from.count && channel >= first + from.channels[part])
    first += from.channels[part++];
  *stride = from.channels[part];
  return reinterpret_cast<T*>(from.data[part]) + sample * pixels * *stride + (channel - first);
}

// The row of sample blockIdx.z, one float per channel.
__device__ inline const float* sample_row(const Rows& rows) {
  return rows.data + blockIdx.z * rows.stride;
}

}  // namespace jaxunet::cuda
