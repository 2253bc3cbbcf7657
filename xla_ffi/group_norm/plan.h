// The calls of the GroupNorm handlers, after their operands have been checked.
//
// Tensors are NHWC, given as one or more parts along their channels (binding/plan.h); `pixels` is
// height x width. A group is channels / groups adjacent channels of a sample, at all pixels. With
// the mean and variance of x's group,
//   inverse = 1 / sqrt(variance + eps),  n = (x - mean) * inverse,  z = scale * n + offset,
//   y = act(z),
// with act = SiLU or the identity. Wu & He 2018, arXiv 1803.08494.
#pragma once

#include "binding/plan.h"

namespace jaxunet {

class Reader;

// Most samples of a call: each is a layer of the grid.
constexpr int64_t kMaxSamples = 65535;
// Most tensors that one call can add to dx: gradients that come from other readers of x.
constexpr int kMaxAdded = 2;

// The tensor to normalise and the affine map that follows. `scale`, `offset`: (1 or batch,
// channels), float32.
struct NormInput {
  Type type;  // of x
  int64_t batch, pixels, groups;
  float eps;
  Parts x;
  Rows scale, offset;
};

// Dropout of y: an element is zero if its 16 bits of a hash are below `threshold`; the others are
// multiplied by `factor` (jaxunet/ops/dropout.py). The hash, of two rounds, takes the position of a
// pair of elements, (pixel * channels + channel) / 2, and the sample's words; the element at the
// even position uses the low 16 bits. Results are rounded to the type of x before the
// multiplication as well as after it. The kernels implement it for SiLU, and for x of one part
// whose pixels are a multiple of 16 bytes.
struct Dropout {
  const uint32_t* seeds = nullptr;  // (batch, 2); null: no dropout
  uint32_t threshold = 0;
  float factor = 1;  // 1 / (1 - rate), rounded to the type of x
};

// y = act(z), together with the statistics that the backward pass needs.
struct NormForward : NormInput {
  bool silu;
  void* y;                // (batch, pixels, channels), the type of x
  float *mean, *inverse;  // (batch, channels): each channel gets the values of its group
  Dropout dropout;
};

// The normalisation as an affine map of each channel, z = a * x + b, with a = scale * inverse and b
// = offset - mean * a.
struct NormStatistics : NormInput {
  float *a, *b, *mean, *inverse;  // (batch, channels)
};

// The backward pass. With dz = dy * act'(z):
//   sums[sample] = (sum of dz, sum of dz * n) over the pixels, for each channel,
//   dx = inverse * (scale * dz - (sum of scale * dz + n * sum of scale * dz * n) / N) + the tensors
//   in `added`,
// where the sums in dx run over the N elements of the group. The gradients of offset and scale are
// `sums`, added over the batch if all samples share one row.
struct NormGradient {
  Type type;
  int64_t batch, pixels, groups;
  Parts x;
  const void* dy;                     // (batch, pixels, channels), the type of x
  Rows scale, offset, mean, inverse;  // mean and inverse as the forward pass wrote them
  bool silu;
  bool rounded;              // dy is a result that was rounded to its type: dz may be as inexact
  float* sums;               // (batch, 2, channels): first of dz, then of dz * n
  bool parameter_gradients;  // write dscale and doffset, too
  float *dscale, *doffset;   // the shapes of scale and offset
  Parts dx;                  // the parts of x
  int added_count;           // tensors in `added`, 0 to kMaxAdded
  std::array<Parts, kMaxAdded> added;  // the parts of x: gradients from other readers of x
  void* active;                        // y again, for a weight gradient that reads it; or null
  // Applied to dy before it goes through act. Excludes `added` and `active`.
  Dropout dropout;
};

// Read and check a call; throw InvalidCall where an operand, a result or an attribute is not as
// described above.
NormForward read_norm_forward(Reader& call);
NormForward read_norm_dropout_forward(Reader& call);
NormStatistics read_norm_statistics(Reader& call);
NormGradient read_norm_gradient(Reader& call);
NormGradient read_norm_dropout_gradient(Reader& call);

}  // namespace jaxunet
