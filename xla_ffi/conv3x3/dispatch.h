// Chooses the kernel of a convolution with plain functions of the plan and of `hopper`, which is
// true if the GPU and the build have the Hopper kernels. Only kHopper accepts bfloat16 images with
// float32 results. The first kernel in this list that accepts a call runs it:
//
//   kFewChannels   16-bit types; x is one array of at most 8 channels; features a multiple of 8; no
//                  shortcut. Forward: no residual, no activation; without a shift, features at
//                  most kMostUnshifted
//   kFewFeatures   16-bit types; at most 8 features; channels of each part a multiple of 8, in at
//                  most 6 chunks of 64; no shortcut. Forward: no residual
//   kHopper        16-bit types; channels of each part and features multiples of 8; at least 4 × 4
//                  pixels. Forward: no activation if the kernel is flipped or results are float32,
//                  a residual in one array
//   kMultistage    16-bit types; channels of each part and features multiples of 8. Forward: no
//                  activation
//   kImplicitGemm  everything else
//
// hopper/tile_choices_test.cc and portable/tile_choices_test.cc list the choices for the shapes of
// the UNet.
#pragma once

#include "conv3x3/plan.h"

namespace jaxunet::cuda {

enum class Kernel { kImplicitGemm, kMultistage, kFewChannels, kFewFeatures, kHopper };

constexpr int kFew = 8;  // channels or features
// Most channels of a convolution with few features: few_features_forward holds all weights in
// shared memory, and a block of compute capability 8.6 or 8.9 has 99 KiB.
constexpr int64_t kMaxChannelsToFew = 384;

// Most features of a convolution of few channels without a shift: its kernel reads the zeros of
// `no_shift` (kernels.h) instead.
constexpr int64_t kMostUnshifted = 4096;

// True if each aligned group of eight channels is contiguous: 16 bytes in a 16-bit type.
constexpr bool in_eights(const Parts& parts) {
  for (int i = 0; i < parts.count; ++i) {
    if (parts.channels[i] % 8) return false;
  }
  return true;
}

constexpr bool few_channels(const Parts& x, int64_t features) {
  return x.count == 1 && x.total <= kFew && features % 8 == 0;
}

// Number of chunks of 64 channels in which the kernels read an image; no chunk crosses from one
// part into the next.
constexpr int64_t chunks_of(const Parts& parts) {
  int64_t count = 0;
  for (int i = 0; i < parts.count; ++i) count += (parts.channels[i] + 63) / 64;
  return count;
}

constexpr bool few_features(const Parts& x, int64_t features) {
  return in_eights(x) && features <= kFew && 64 * chunks_of(x) <= kMaxChannelsToFew;
}

// The multistage kernels count rows and columns of matrices, rounded up to whole tiles, in 32 bits.
// Pixels have the same limit (kMaxPixels in binding/reader.h).
constexpr int64_t kMostRows = (int64_t{1} << 31) - 4096;

constexpr bool takes_multistage(const Parts& x, const Parts& projected, int64_t features) {
  return in_eights(x) && in_eights(projected) && features % 8 == 0 && features <= kMostRows &&
         9 * x.total + projected.total <= kMostRows;
}
constexpr bool takes_multistage(const Conv3x3& plan) {
  return plan.type != Type::kFloat32 && !plan.wide && !plan.a.data && plan.y.count == 1 &&
         in_eights(plan.residual) && takes_multistage(plan.x, plan.projected, plan.features);
}
constexpr bool takes_multistage(const Conv3x3WeightGradient& plan) {
  return plan.type != Type::kFloat32 && takes_multistage(plan.x, plan.projected, plan.features);
}

constexpr Kernel forward_kernel(const Conv3x3& plan, bool hopper) {
  if (plan.type == Type::kFloat32) return Kernel::kImplicitGemm;  // wgmma has tf32, not float32
  const bool activation = plan.a.data != nullptr;
  if (plan.residual.count + plan.projected.count == 0 && !plan.wide) {
    if (few_channels(plan.x, plan.features) && !activation &&
        (plan.shift.data || plan.features <= kMostUnshifted))
      return Kernel::kFewChannels;
    if (few_features(plan.x, plan.features)) return Kernel::kFewFeatures;
  }
  const Kernel portable = takes_multistage(plan) ? Kernel::kMultistage : Kernel::kImplicitGemm;
  if (!hopper || !in_eights(plan.x) || !in_eights(plan.projected) || plan.features % 8)
    return portable;
  if ((plan.flipped || plan.wide) && activation) return portable;
  if (plan.residual.count > 1) return portable;
  // A strip of a smaller image would be mostly padding.
  return plan.width < 4 || plan.height < 4 ? portable : Kernel::kHopper;
}

// True if the Hopper kernel can write all parts of y in one launch: each part must begin at a whole
// tile.
constexpr bool in_one_launch(const Conv3x3& plan, bool hopper) {
  for (int i = 0; i + 1 < plan.y.count; ++i) {
    if (plan.y.channels[i] % 64) return false;
  }
  return forward_kernel(plan, hopper) == Kernel::kHopper;
}

// True if the Hopper kernels compute the plan by phases: each phase must have whole chunks and
// tiles.
template <class Plan>
constexpr bool takes_upsampled(const Plan& plan, bool hopper) {
  return hopper && plan.type != Type::kFloat32 && plan.channels % 64 == 0 &&
         plan.features % 64 == 0 && plan.features > 0 && plan.height >= 4 && plan.width >= 4;
}

constexpr Kernel weight_gradient_kernel(const Conv3x3WeightGradient& plan, bool hopper) {
  if (plan.type == Type::kFloat32) return Kernel::kImplicitGemm;
  if (plan.projected.count == 0) {
    if (few_channels(plan.x, plan.features)) return Kernel::kFewChannels;
    if (few_features(plan.x, plan.features)) return Kernel::kFewFeatures;
  }
  const Kernel portable = takes_multistage(plan) ? Kernel::kMultistage : Kernel::kImplicitGemm;
  if (!hopper || !in_eights(plan.x) || !in_eights(plan.projected) || plan.features % 8)
    return portable;
  return plan.width < 4 || plan.height < 4 ? portable : Kernel::kHopper;
}

}  // namespace jaxunet::cuda
