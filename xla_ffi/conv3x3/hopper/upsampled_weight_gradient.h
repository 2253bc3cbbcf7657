// The layout of the partial results of the weight gradient by phases: upsampled_weight_gradient.cuh
// writes them, upsampled_weight_gradient_fold.cu adds and folds them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/host_device.h"
#include "conv3x3/plan.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda::weight_gradient {

// A tile: 64 input × 64 output channels of the eight taps [b, u, v] of the phases (a, 0), (a, 1).
// The accumulator of each of a block's four consumers (b, u) has the 64 features as rows and two
// taps v × 64 channels as columns. Each of the consumer's 128 threads holds 64 registers, in fours
// of two features × two channels, as in accumulator_tile.h. A tile is float[4 consumers][16
// fours][128][4].
struct UpsampledTile {
  static constexpr int kConsumers = 4, kFours = 16, kThreads = 128;
  static constexpr int kEntries = kConsumers * kFours * kThreads * 4;

  static JAXUNET_HOST_DEVICE int entry(int consumer, int four, int thread) {
    return ((consumer * kFours + four) * kThreads + thread) * 4;
  }
};

// (splits, tiles) of UpsampledTile, tiles counted as (a, chunk of x, chunk of dy); and partial sums
// of dy, (slots of a = 0, then of a = 1; batch, features), as in split_k.h.
struct UpsampledPartials {
  float *tiles, *shift;
  int splits, slots;
};

// Writes plan.dkernel and plan.dshift: zeros if there are no splits.
cudaError_t fold_upsampled(const UpsampledWeightGradient& plan, const UpsampledPartials& partials,
                           cudaStream_t stream);

}  // namespace jaxunet::cuda::weight_gradient
