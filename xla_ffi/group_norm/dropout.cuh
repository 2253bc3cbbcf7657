// Dropout inside the GroupNorm kernels: which elements of a vector are dropped, and the factor of
// the others. The results equal those of jaxunet/ops/dropout.py bit for bit: a number is rounded to
// its type before it is multiplied by the factor, and again afterwards.
//
// Kernels take dropout as a template argument, so that kernels without it contain no code for it.
#pragma once

#include "vector.cuh"

namespace jaxunet::cuda {

// Mixes each bit of a word into all of its bits: the finalizer of MurmurHash3.
__device__ inline uint32_t mix_bits(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}

// Dropout of one sample, in vectors of V channels. Does nothing without kDrops.
template <class T, int V, bool kDrops>
struct SampleDropout {
  uint32_t first, second, threshold;
  float factor;  // exactly representable in T

  __device__ SampleDropout(const Dropout& dropout, int64_t sample)
      : first(__ldg(dropout.seeds + 2 * sample)),
        second(__ldg(dropout.seeds + 2 * sample + 1)),
        threshold(dropout.threshold),
        factor(dropout.factor) {}
  // Returns a mask whose bit j says that channel j of a vector is dropped. `position`: the vector's
  // position in its sample, pixel * channels + channel, a multiple of V.
  //
  // Pair j hashes position / 2 + j, which is position / 2 ^ j. The hash begins with ^ first and
  // ^ (>> 16); j has too few bits for the shift, so this is computed once for all pairs.
  __device__ uint32_t bits(uint32_t position) const {
    static_assert((V & (V - 1)) == 0 && V > 1 && V <= 32, "position / 2 + j is position / 2 ^ j");
    uint32_t word = (position >> 1) ^ first, found = 0;
    word ^= word >> 16;
#pragma unroll
    for (int j = 0; j < V / 2; ++j) {
      uint32_t mixed = (word ^ static_cast<uint32_t>(j)) * 0x85EBCA6Bu;
      mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
      mixed = mix_bits((mixed ^ (mixed >> 16)) + second);
      if ((mixed & 0xFFFFu) < threshold) found |= 1u << 2 * j;
      if (mixed >> 16 < threshold) found |= 2u << 2 * j;
    }
    return found;
  }
  __device__ static uint32_t position(int pixel, int channels, int channel) {
    return static_cast<uint32_t>(pixel) * static_cast<uint32_t>(channels) +
           static_cast<uint32_t>(channel);
  }
  // Zeroes the channels whose bits are set.
  __device__ static void drop(uint32_t bits, float (&value)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (bits >> j & 1u) value[j] = 0.0f;
    }
  }
  // Multiplies the V channels at `of` by the factor.
  __device__ void scale(T* of) const {
    if constexpr (Vector<T, V>::kPairs) {
      using Pair = typename PairOf<T>::Type;
      auto* const pairs = reinterpret_cast<Pair*>(of);
      Pair both;
      narrow(factor, factor, &both);
#pragma unroll
      for (int i = 0; i < V / 2; ++i) pairs[i] = __hmul2_rn(pairs[i], both);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) of[j] = narrow<T>(wide(of[j]) * factor);
    }
  }
};

template <class T, int V>
struct SampleDropout<T, V, false> {
  __device__ SampleDropout(const Dropout&, int64_t) {}
  __device__ static uint32_t bits(uint32_t) { return 0; }
  __device__ static uint32_t position(int, int, int) { return 0; }
  __device__ static void drop(uint32_t, float (&)[V]) {}
  __device__ static void scale(T*) {}
};

}  // namespace jaxunet::cuda
