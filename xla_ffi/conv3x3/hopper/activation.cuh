// SiLU(a · x + b) of a haloed strip in shared memory, in place: once for the nine taps that read
// it.
#pragma once

#include "conv3x3/activation.cuh"
#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda {

// `thread`: one of `kThreads`; `coefficients`: of its channels, 8 (thread % 8) to 8 (thread % 8) +
// 7 of the strip's 64.
template <class T, int kRows, int kThreads>
__device__ void activate_strip(unsigned char* pixels, const Strip& at, int height, int width,
                               int thread, const ActivationCoefficients& coefficients) {
  const int eighth = thread % 8;
#pragma unroll 4
  for (int pixel = thread / 8; pixel < (kRows + 2) * kHaloColumns; pixel += kThreads / 8) {
    const int down = pixel / kHaloColumns, y = at.row - 1 + down,
              x = at.column - 1 + pixel - down * kHaloColumns;
    auto* here = reinterpret_cast<T*>(pixels + pixel * kRowBytes + ((eighth ^ pixel % 8) << 4));
    const bool inside = y >= 0 && y < height && x >= 0 && x < width;
    Eight<T> values;
    values.load(here);
    coefficients.apply(values, inside);
    values.store(here);
  }
}

}  // namespace jaxunet::cuda
