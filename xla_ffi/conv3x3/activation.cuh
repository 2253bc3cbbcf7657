// SiLU(a · x + b) of eight channels in registers.
#pragma once

#include "common/fast_silu.cuh"
#include "common/types.cuh"
#include "conv3x3/plan.h"

namespace jaxunet::cuda {

// a and b of eight channels, halved, because fast_silu takes x / 2.
//
// Its absolute error is at most |x| · 2^-12. For negative x the sum cancels: for x < -3.7 the bound
// exceeds 1% of the result, and for x < -8.3 the result itself, which is below 0.0021 there. For
// normally distributed x of deviation 1, the root mean square of the bound is 0.16 times that of
// rounding the results to bfloat16, and 1.27 times that of rounding to float16
// (test_activation_error.py). GroupNorm's kernels use it in bfloat16, too. In float16 they use ex2
// and rcp, whose errors of about 2^-22 vanish in the rounding; the activation that they recompute
// for the weight gradient may then differ from this one by up to the bound.
struct ActivationCoefficients {
  float a[8], b[8];

  // `there`: true if the channels exist; otherwise the coefficients are zeros.
  __device__ ActivationCoefficients(const Rows& of_a, const Rows& of_b, int64_t sample, int channel,
                                    bool there) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = there ? 0.5f * of_a.data[sample * of_a.stride + channel + i] : 0.0f;
      b[i] = there ? 0.5f * of_b.data[sample * of_b.stride + channel + i] : 0.0f;
    }
  }

  // Activates eight values in place. Outside of the image they become zero, because the convolution
  // pads the activated image.
  template <class T>
  __device__ void apply(Eight<T>& values, bool inside) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float half = a[i] * wide(values.at[i]) + b[i];
      values.at[i] = narrow<T>(inside ? fast_silu(half) : 0.0f);
    }
  }
};

}  // namespace jaxunet::cuda
