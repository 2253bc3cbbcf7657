// 3×3 convolution of NHWC tensors, stride 1, zero padding 1, with a UNet's prologue and epilogue.
#pragma once

#include "binding/plan.h"

namespace jaxunet {

class Reader;

// y = conv(act(x), kernel) + shift + residual + projected · shortcut. Every term but y is optional.
// act(x) = SiLU(a · x + b) if a is given, else x. "Channels" are the channels of x or of
// `projected`; "features" are the output channels, those of y. A shortcut is a 1×1 convolution of
// `projected`.
struct Conv3x3 {
  Type type;  // of all arrays except shift, a and b
  // True if y and the residual are float32 although x is bfloat16, because x and the kernel are
  // terms of float32 arrays (jaxunet/ops/terms.py).
  bool wide;
  int64_t batch, height, width, features;
  Parts x;  // empty: only the projection, a linear layer
  // (3, 3, channels, features). Flipped: (3, 3, features, channels), read as kernel[::-1, ::-1]
  // with its last two dimensions exchanged; the input gradient.
  const void* kernel;
  bool flipped;
  Rows shift;      // null data: none
  Parts residual;  // as many channels as features
  Parts projected;
  const void* shortcut;  // (projected channels, features), flipped (features, projected channels);
                         // null: none
  Rows a, b;             // null data: no activation
  Parts y;               // the features, one part after the other; several parts only without x
};

// y = conv(nearest(x), w) + shift, where nearest(x) repeats every pixel in two rows and two
// columns. The kernels compute it by phases, where phase (a, b) is the pixels y[2i + a, 2j + b].
// They are a convolution of x with 2 × 2 taps, and each tap is the sum of the rows and columns of w
// that read the same pixel of x:
//   y[2i + a, 2j + b] = sum over u, v of x[i + u + a - 1, j + v + b - 1] · kernel[a, b, u, v].
// Flipped, x is the gradient of the output and y the gradient of the input:
//   y[i, j] = sum over a, b, u, v of x[2(i - u - a + 1) + a, 2(j - v - b + 1) + b]
//             · kernel[a, b, u, v] transposed.
struct UpsampledConv3x3 {
  Type type;                     // of all arrays except shift
  int64_t batch, height, width;  // of the small image: of x; flipped, of y
  int64_t channels, features;    // of x, of y
  const void *x, *kernel;        // kernel: (2, 2, 2, 2, channels, features), a, b, u, v first;
                                 // flipped: (2, 2, 2, 2, features, channels)
  bool flipped;
  Rows shift;  // null data: none
  void* y;
};

// An array whose type is float32 or the type of x.
struct Result {
  void* data;
  Type type;
};

// The gradients of a norm's scale and offset if all samples share them: the norm's gradient kernel
// writes those of each sample to `sums`, first of offset, then of scale, and the last launch of a
// weight gradient adds them over the samples.
struct NormSums {
  const float* sums;            // (batch, 2, channels)
  int64_t batch, channels;      // channels = 0: no norm
  float *of_scale, *of_offset;  // the gradients, (1, channels)
};

// dkernel[i, j] = sum over pixels of x shifted by (i - 1, j - 1), times dy; dshortcut = the same
// for `projected`, not shifted; dshift = sums of dy over pixels. Either x or `projected` may be
// empty.
struct Conv3x3WeightGradient {
  Type type;
  int64_t batch, height, width, features;
  Parts x;
  const void* dy;
  Parts projected;
  Result dkernel;    // (3, 3, channels, features)
  Result dshift;     // (shifts, features)
  int64_t shifts;    // batch, or 1: the sum over all samples
  Result dshortcut;  // (projected channels, features)
  NormSums norm;     // of the norm that precedes the convolution
  // Uninitialized memory for partial results, at least `minimum_workspace` floats. The smaller it
  // is, the fewer blocks share the work.
  float* workspace;
  int64_t workspace_floats;
};

// Size in floats of the gradients of one split before they are narrowed.
constexpr int64_t minimum_workspace(const Conv3x3WeightGradient& plan) {
  return (9 * plan.x.total + plan.projected.total + plan.batch) * plan.features;
}

// The same for y = conv(nearest(x), kernel) + shift: dkernel[r, s] = sum over pixels of nearest(x)
// shifted by (r - 1, s - 1), times dy. By phases, the gradients of the phases' taps are sums over
// the pixels of the small image, and dkernel[r, s] is the sum of the gradients of the four taps
// that contain kernel[r, s].
struct UpsampledWeightGradient {
  Type type;
  int64_t batch, height, width;  // of the small image
  int64_t channels, features;
  const void *x, *dy;
  Result dkernel, dshift;  // as above
  int64_t shifts;
  float* workspace;  // as above
  int64_t workspace_floats;
};

// Size in floats of the gradients of one split: 16 taps, and two phases' sums of dy.
constexpr int64_t minimum_workspace(const UpsampledWeightGradient& plan) {
  return (16 * plan.channels + 2 * plan.batch) * plan.features;
}

Conv3x3 read_conv3x3(Reader& call);
// The gradient of projected · shortcut with respect to `projected`: dy times the transposed
// shortcut, a plan without x.
Conv3x3 read_conv3x3_shortcut_gradient(Reader& call);
UpsampledConv3x3 read_conv3x3_upsampled(Reader& call);
Conv3x3WeightGradient read_conv3x3_weight_gradient(Reader& call);
// The same without a workspace, for calls of several weight gradients.
Conv3x3WeightGradient read_conv3x3_weight_gradient_member(Reader& call);
UpsampledWeightGradient read_conv3x3_upsampled_weight_gradient(Reader& call);

}  // namespace jaxunet
