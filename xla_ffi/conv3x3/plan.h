// 3×3 convolution of NHWC tensors, stride 1, zero padding 1, with what comes before and after it.
#pragma once

#include "binding/plan.h"

namespace jaxunet {

class Reader;

// y = conv(act(x), kernel) + shift + residual + projected · shortcut, of which any but y may be missing; act(x) =
// SiLU(a · x + b) where a is given.
struct Conv3x3 {
  Type type;
  int64_t batch, height, width, features;
  Parts x;  // none: the projection alone, a linear layer
  const void*
      kernel;  // (3, 3, channels, features); flipped: (3, 3, features, channels), read as kernel[::-1, ::-1] transposed
  bool flipped;
  Rows shift;      // data is null without one
  Parts residual;  // as many channels as features
  Parts projected;
  const void*
      shortcut;  // (channels projected, features), or null without them; flipped: (features, channels projected)
  Rows a, b;     // data is null without activation
  Parts y;       // the features, one part after the other; several of the projection alone
};

// An array of float32 or of the type of x.
struct Result {
  void* data;
  Type type;
};

// dkernel[i, j] = sum over pixels of act(x) shifted by (i - 1, j - 1), times dy; dshortcut, the same of what a shortcut
// projects, unshifted; and the sums of dy over pixels. Of the first two one may be missing.
struct Conv3x3WeightGradient {
  Type type;
  int64_t batch, height, width, features;
  Parts x;
  const void* dy;
  Rows a, b;
  Parts projected;   // none: no shortcut
  Result dkernel;    // (3, 3, channels, features)
  Result dshift;     // (shifts, features)
  int64_t shifts;    // batch, or 1: the sum over all samples
  Result dshortcut;  // (channels projected, features)
  // Of the norm before, that its own gradient leaves to add: the sums of every sample, for offset and scale.
  bool norm;
  const float* norm_sums;       // (batch, 2, channels)
  float *of_scale, *of_offset;  // (1, channels)
  // For partial sums, of any content; at least `minimum_workspace`: the less, the fewer blocks share the work.
  float* workspace;
  int64_t workspace_floats;
};

// Floats: the gradients once, before they are narrowed.
constexpr int64_t minimum_workspace(const Conv3x3WeightGradient& plan) {
  return (9 * plan.x.total + plan.projected.total + plan.batch) * plan.features;
}

Conv3x3 read_conv3x3(Reader& call);
// The gradient of projected · shortcut by what is projected, dy · shortcut transposed: a plan without x.
Conv3x3 read_conv3x3_shortcut_gradient(Reader& call);
Conv3x3WeightGradient read_conv3x3_weight_gradient(Reader& call);
// A linear layer, whose kernel takes the shortcut's place: plans without x.
Conv3x3 read_linear(Reader& call);
Conv3x3WeightGradient read_linear_weight_gradient(Reader& call);

}  // namespace jaxunet
