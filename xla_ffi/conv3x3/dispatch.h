// Which kernel computes a convolution: the one place where it is decided. Plain functions of the plan and of whether
// the GPU has wgmma; launch.cc says at compile time what they choose for the UNet's shapes.
#pragma once

#include "conv3x3/plan.h"

namespace jaxunet::cuda {

enum class Kernel { kPortable, kFewChannels, kFewFeatures, kHopper };

constexpr int kFew = 8;
// The kernel for few features holds all weights in shared memory, of which a block has 99 KB on compute capability 8.9.
constexpr int64_t kMostChannelsToFew = 384;

constexpr bool in_eights(const Parts& parts) {
  for (int i = 0; i < parts.count; ++i) {
    if (parts.channels[i] % 8) return false;
  }
  return true;
}

constexpr bool few_channels(const Parts& x, int64_t features, bool activation) {
  return x.count == 1 && x.total <= kFew && features % 8 == 0 && !activation;
}

// Chunks of 64 channels, which do not reach across parts.
constexpr int64_t chunks_of(const Parts& parts) {
  int64_t count = 0;
  for (int i = 0; i < parts.count; ++i) count += (parts.channels[i] + 63) / 64;
  return count;
}

constexpr bool few_features(const Parts& x, int64_t features) {
  return in_eights(x) && features <= kFew && 64 * chunks_of(x) <= kMostChannelsToFew;
}

constexpr Kernel forward_kernel(const Conv3x3& plan, bool hopper) {
  if (plan.type == Type::kFloat32) return Kernel::kPortable;  // wgmma would multiply it as tf32 alone
  const bool activation = plan.a.data != nullptr;
  if (plan.residual.count + plan.projected.count == 0) {
    if (few_channels(plan.x, plan.features, activation)) return Kernel::kFewChannels;
    if (few_features(plan.x, plan.features)) return Kernel::kFewFeatures;
  }
  if (!hopper || !in_eights(plan.x) || !in_eights(plan.projected) || plan.features % 8) return Kernel::kPortable;
  if (plan.flipped && activation) return Kernel::kPortable;
  if (plan.residual.count > 1) return Kernel::kPortable;
  // In images of few pixels a strip would be padding for the most part.
  return plan.width < 4 || plan.height < 4 ? Kernel::kPortable : Kernel::kHopper;
}

// Whether Hopper's kernel writes all parts of y at once: they begin at whole tiles.
constexpr bool in_one_launch(const Conv3x3& plan, bool hopper) {
  for (int i = 0; i + 1 < plan.y.count; ++i) {
    if (plan.y.channels[i] % 64) return false;
  }
  return forward_kernel(plan, hopper) == Kernel::kHopper;
}

constexpr Kernel weight_gradient_kernel(const Conv3x3WeightGradient& plan, bool hopper) {
  if (plan.type == Type::kFloat32) return Kernel::kPortable;
  if (plan.projected.count == 0) {
    if (few_channels(plan.x, plan.features, plan.a.data != nullptr)) return Kernel::kFewChannels;
    if (few_features(plan.x, plan.features)) return Kernel::kFewFeatures;
  }
  if (!hopper || !in_eights(plan.x) || !in_eights(plan.projected) || plan.features % 8) return Kernel::kPortable;
  return plan.width < 4 || plan.height < 4 ? Kernel::kPortable : Kernel::kHopper;
}

}  // namespace jaxunet::cuda
