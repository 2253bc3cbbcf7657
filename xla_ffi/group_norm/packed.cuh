// Packed: vectors of channels as 32-bit words, for values that stay in registers for a long time.
// nvcc 13.0 gives each channel of an array of Vector<__nv_bfloat16> (vector.cuh) a register of its
// own, and spills.
#pragma once

#include <type_traits>

#include "vector.cuh"

namespace jaxunet::cuda {

// V adjacent channels of one pixel: 16 bytes of them, or one.
template <class T, int V>
struct Packed {
  static_assert(V * sizeof(T) == 16, "four words");
  alignas(16) uint32_t words[4];

  __device__ void load(const T* from) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  }
  __device__ void store(T* to) const { store_16(to, words); }
  __device__ void to_floats(float (&to)[V]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        to[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        const float2 two = wide(*reinterpret_cast<const __half2*>(&words[i]));
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
      }
    }
  }
  __device__ void from_floats(const float (&from)[V]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(from[i]);
      } else {
        typename PairOf<T>::Type two;
        narrow(from[2 * i], from[2 * i + 1], &two);
        words[i] = *reinterpret_cast<const uint32_t*>(&two);
      }
    }
  }
};

template <class T>
struct Packed<T, 1> {
  T value;

  __device__ void load(const T* from) { value = __ldg(from); }
  __device__ void to_floats(float (&to)[1]) const { to[0] = wide(value); }
};

}  // namespace jaxunet::cuda
