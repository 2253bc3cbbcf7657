// SiLU(a · x + b) of a strip with its halo, in shared memory, in place: once for the nine taps that read it.
#pragma once

#include "hopper_instructions.cuh"
#include "hopper_tile.h"
#include "numbers.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// a and b of eight channels, halved: x · sigmoid(x) = h + h · tanh(h) with h = x / 2.
struct Coefficients {
  float a[8], b[8];

  Coefficients() = default;
  // Channels that are not there stay the zeros that the copy engine gave them.
  __device__ Coefficients(const Rows& of_a, const Rows& of_b, int64_t sample, int channel, bool there) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = there ? 0.5f * of_a.data[sample * of_a.stride + channel + i] : 0.0f;
      b[i] = there ? 0.5f * of_b.data[sample * of_b.stride + channel + i] : 0.0f;
    }
  }
};

// One of `kThreads` threads; `coefficients` are those of its channels, 8 (thread % 8) to 8 (thread % 8) + 7 of the
// strip's 64.
template <class T, int kRows, int kThreads>
__device__ void activate_strip(unsigned char* pixels, const Strip& at, int height, int width, int thread,
                               const Coefficients& coefficients) {
  const int eighth = thread % 8;
#pragma unroll 4
  for (int pixel = thread / 8; pixel < (kRows + 2) * kHaloColumns; pixel += kThreads / 8) {
    const int down = pixel / kHaloColumns, y = at.row - 1 + down, x = at.column - 1 + pixel - down * kHaloColumns;
    auto* here = reinterpret_cast<T*>(pixels + pixel * kRowBytes + ((eighth ^ pixel % 8) << 4));
    const bool inside = y >= 0 && y < height && x >= 0 && x < width;  // padding is zero after the activation
    Eight<T> values;
    values.load(here);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float half = coefficients.a[i] * wide(values.at[i]) + coefficients.b[i];
      values.at[i] = narrow<T>(inside ? half + half * fast_tanh(half) : 0.0f);
    }
    values.store(here);
  }
}

}  // namespace jaxunet::cuda
