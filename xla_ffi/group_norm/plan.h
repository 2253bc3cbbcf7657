// GroupNorm of NHWC tensors, with SiLU where asked for.
#pragma once

#include "../plan.h"

namespace jaxunet {

class Reader;

// moments[b, c] = mean and mean squared deviation over the pixels of x[b, :, :, c].
struct Moments {
  Type type;
  int64_t batch, pixels, channels;
  const void* x;
  float* moments;  // (batch, channels, 2)
};

// y = act(a · x + b), act = SiLU or identity.
struct NormApply {
  Type type;
  int64_t batch, pixels;
  Parts x;
  Rows a, b;
  bool silu;
  void* y;
};

// With n = (x - mean) · inverse, z = scale · n + offset and dz = dy · act'(z): sums = (sum of dz, sum of dz · n) over
// the pixels, and the gradient of every part of x. A group of N elements takes part in dx = inverse · (scale · dz -
// (sum over the group of scale · dz + n · sum over the group of scale · dz · n) / N).
struct NormGradient {
  Type type;
  int64_t batch, pixels, groups;
  Parts x;
  const void* dy;
  Rows scale, offset, mean, inverse;
  bool silu;
  float* sums;  // (batch, 2, channels)
  Parts dx;
};

Moments read_moments(Reader& call);
NormApply read_norm_apply(Reader& call);
NormGradient read_norm_gradient(Reader& call);

}  // namespace jaxunet
