// Float32 numbers as 16-bit integers with a common exponent: block floating point. The largest of V
// numbers keeps at least 14 significant bits, and all have the same absolute error, at most 2^-14
// of the largest, where bfloat16 has 2^-9 and float16 2^-12 of each number.
#pragma once

#include <cstdint>

namespace jaxunet::cuda {

// Numbers of which all are below this in magnitude become zeros: their exponents would underflow.
constexpr float kLeastShared = 1e-30f;

// Rounds V numbers to multiples of a power of two; returns its encoding, for from_shared(). Numbers
// that are infinite or not a number give arbitrary results.
template <int V>
__device__ uint8_t to_shared(const float (&from)[V], uint32_t (&to)[V / 2]) {
  float largest = kLeastShared;
#pragma unroll
  for (int j = 0; j < V; ++j) largest = fmaxf(largest, fabsf(from[j]));
  const uint32_t exponent = __float_as_uint(largest) & 0x7F800000u;
  // 2^(13 - e), where |from| < 2^(e + 1), so that the integers are within ±2^14.
  const float scale = __uint_as_float((254u + 13u << 23) - exponent);
  // Adding 1.5 * 2^23 leaves the rounded integer in the lowest bits, offset by 2^15.
  constexpr float kRound = 12582912.0f + 32768.0f;
#pragma unroll
  for (int j = 0; j < V; j += 2) {
    const uint32_t low = __float_as_uint(fmaf(from[j], scale, kRound)),
                   high = __float_as_uint(fmaf(from[j + 1], scale, kRound));
    to[j / 2] = __byte_perm(low, high, 0x5410);
  }
  return static_cast<uint8_t>(exponent >> 23);
}

// The numbers that to_shared() encoded.
template <int V>
__device__ void from_shared(const uint32_t (&from)[V / 2], uint8_t encoded, float (&to)[V]) {
  const float scale = __uint_as_float((static_cast<uint32_t>(encoded) - 13u) << 23);
  constexpr float kOffset = 8388608.0f + 32768.0f;
  const float offset = -kOffset * scale;
#pragma unroll
  for (int j = 0; j < V; j += 2) {
    const float low = __uint_as_float(__byte_perm(from[j / 2], 0x4B000000u, 0x7610)),
                high = __uint_as_float(__byte_perm(from[j / 2], 0x4B000000u, 0x7632));
    to[j] = fmaf(low, scale, offset);
    to[j + 1] = fmaf(high, scale, offset);
  }
}

}  // namespace jaxunet::cuda
