// GroupNorm of NHWC tensors, with SiLU where asked for.
#pragma once

#include "../plan.h"

namespace jaxunet {

class Reader;

constexpr int kMaxAdded = 2;

// What a normalisation starts from: the image, its groups, and the affine map that follows.
struct NormInput {
  Type type;
  int64_t batch, pixels, groups;
  float eps;
  Parts x;
  Rows scale, offset;
};

// y = act(n · scale + offset), n = (x - mean) · inverse, act = SiLU or identity; mean and inverse = 1 / sqrt(variance +
// eps) of the group that a channel is in.
struct NormForward : NormInput {
  bool silu;
  void* y;
  float *mean, *inverse;  // (batch, channels)
};

// The same normalisation as a · x + b.
struct NormStatistics : NormInput {
  float *a, *b, *mean, *inverse;  // (batch, channels)
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
// (sum over the group of scale · dz + n · sum over the group of scale · dz · n) / N), to which `added` is added:
// what else read x gives its own gradients of it.
struct NormGradient {
  Type type;
  int64_t batch, pixels, groups;
  Parts x;
  const void* dy;
  Rows scale, offset, mean, inverse;
  bool silu;
  float* sums;   // (batch, 2, channels)
  bool samples;  // whether the gradients of scale and offset are wanted too
  float *of_scale,
      *of_offset;  // as many rows as scale and offset have: the sums, over the batch where samples share one
  Parts dx;
  int additions;  // 0 to kMaxAdded: tensors of the shape of x that are added to dx
  std::array<Parts, kMaxAdded> added;
  void* active;  // act(z) once more, or null
};

NormForward read_norm_forward(Reader& call);
NormStatistics read_norm_statistics(Reader& call);
NormApply read_norm_apply(Reader& call);
NormGradient read_norm_gradient(Reader& call);

}  // namespace jaxunet
