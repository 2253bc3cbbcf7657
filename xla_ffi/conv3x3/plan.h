// 3×3 convolution of NHWC tensors, stride 1, zero padding 1, with what comes before and after it.
#pragma once

#include "../plan.h"

namespace jaxunet {

class Reader;

// y = conv(act(x), kernel) + shift + residual, or + residual · shortcut; act(x) = SiLU(a · x + b) where a is given.
struct Conv3x3 {
  Type type;
  int64_t batch, height, width, features;
  Parts x;  // none: the residual's projection alone
  const void*
      kernel;  // (3, 3, channels, features); flipped: (3, 3, features, channels), read as kernel[::-1, ::-1] transposed
  bool flipped;
  Rows shift;  // data is null without one
  Parts residual;
  const void* shortcut;  // (channels of the residual, features), or null; flipped: (features, channels of the residual)
  Rows a, b;             // data is null without activation
  Parts y;               // the features, one part after the other; several of the residual's projection alone
};

// An array of float32 or of the type of x.
struct Result {
  void* data;
  Type type;
};

// dkernel[i, j] = sum over pixels of act(x) shifted by (i - 1, j - 1), times dy; the same of the residual that a
// shortcut projects, where it is; and the sums of dy over pixels.
struct Conv3x3WeightGradient {
  Type type;
  int64_t batch, height, width, features;
  Parts x;
  const void* dy;
  Rows a, b;
  Parts residual;    // none: no shortcut
  Result dkernel;    // (3, 3, channels, features)
  Result dshift;     // (shifts, features)
  int64_t shifts;    // batch, or 1: the sum over all samples
  Result dshortcut;  // (channels of the residual, features), where there is one
  // For partial sums, of any content; at least `minimum_workspace`: the less, the fewer blocks share the work.
  float* workspace;
  int64_t workspace_floats;
};

// Floats: the gradients once, before they are narrowed.
constexpr int64_t minimum_workspace(const Conv3x3WeightGradient& plan) {
  return (9 * plan.x.total + plan.residual.total + plan.batch) * plan.features;
}

Conv3x3 read_conv3x3(Reader& call);
// The gradient of residual · shortcut by the residual, dy · shortcut transposed: a plan without x.
Conv3x3 read_conv3x3_shortcut_gradient(Reader& call);
Conv3x3WeightGradient read_conv3x3_weight_gradient(Reader& call);

}  // namespace jaxunet
