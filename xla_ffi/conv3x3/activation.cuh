// SiLU(a · x + b) of eight channels in registers.
#pragma once

#include "common/special_functions.cuh"
#include "common/types.cuh"
#include "conv3x3/plan.h"

namespace jaxunet::cuda {

// a and b of eight channels, halved: SiLU(x) = x · sigmoid(x) = h + h · tanh(h) with h = x / 2.
struct ActivationCoefficients {
  float a[8], b[8];

  // `there`: the channels exist; else the coefficients are zeros.
  __device__ ActivationCoefficients(const Rows& of_a, const Rows& of_b, int64_t sample, int channel,
                                    bool there) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = there ? 0.5f * of_a.data[sample * of_a.stride + channel + i] : 0.0f;
      b[i] = there ? 0.5f * of_b.data[sample * of_b.stride + channel + i] : 0.0f;
    }
  }

  // Activates eight values in place. Outside of the image they become zero: the convolution pads
  // what the activation returns.
  template <class T>
  __device__ void apply(Eight<T>& values, bool inside) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float half = a[i] * wide(values.at[i]) + b[i];
      values.at[i] = narrow<T>(inside ? half + half * fast_tanh(half) : 0.0f);
    }
  }
};

}  // namespace jaxunet::cuda
