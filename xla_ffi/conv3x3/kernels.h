// The convolution's CUDA kernels; they allocate nothing and run on the given stream. `launch.cc` is where one is
// chosen.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3x3/plan.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda {

// Handlers' entries: the best kernel for the shape, the type and the device.
cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream);
cudaError_t conv3x3_shortcut_gradient(const Conv3x3& plan, cudaStream_t stream);
cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream);
cudaError_t linear(const Conv3x3& plan, cudaStream_t stream);
cudaError_t linear_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream);

// Every shape and type, on compute capability 8.0 and later; y in one part.
cudaError_t portable_forward(const Conv3x3& plan, cudaStream_t stream);
// Sums over `splits` shares of the pixels, (splits, 3, 3, channels, features), and of a shortcut, (splits, channels
// projected, features).
cudaError_t portable_weight_gradient(const Conv3x3WeightGradient& plan, int splits, float* sums, float* of_shortcut,
                                     cudaStream_t stream);

// 16-bit types, on compute capability 8.0 and later: at most eight channels, read from one array; at most eight
// features. `choice.h` says which plans they compute.
cudaError_t few_channels_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
cudaError_t few_features_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);

// Compute capability 9.0. The parts of y begin at multiples of 64 channels.
cudaError_t hopper_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);

// How a weight gradient is cut: tiles of the gradient, and strips of pixels that are shared out among splits; and the
// tiles of a shortcut's gradient, with the time that a strip takes there and the size, as shares of the others'.
struct WeightGradientCut {
  int64_t blocks, strips_of_sample, shortcut_blocks = 0;
  int64_t samples = 1;  // that a strip is of: it may have the same pixels of several
  double shortcut_time = 0, shortcut_size = 0;
  bool whole = false;  // no tile reaches past the channels, so that their sums may lie as tiles (tile_of_sums.h)
};
// Sums over the splits of `shares`, (splits, 3, 3, channels, features), and those of dy (see shares.h).
WeightGradientCut few_weight_gradient_cut(const Conv3x3WeightGradient& plan);
cudaError_t few_weight_gradient(const Conv3x3WeightGradient& plan, const Shares& shares, float* sums,
                                const ShiftSums& shift, cudaStream_t stream);
WeightGradientCut hopper_weight_gradient_cut(const Conv3x3WeightGradient& plan);
// `tiled`: sums are (splits, tiles), where tiles are whole. The shortcut has shares of its own; its sums are (splits,
// channels projected, features). Where there is no x, its blocks also sum dy.
cudaError_t hopper_weight_gradient(const Conv3x3WeightGradient& plan, const Shares& shares, float* sums, bool tiled,
                                   const ShiftSums& shift, const Shares& shortcut_shares, float* shortcut_sums,
                                   cudaStream_t stream);

// Sums of dy over `segments` shares of each sample's pixels, (segments, batch, features).
cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums, cudaStream_t stream);

// to[i] = from[0, i] + from[1, i] + ..., always in one order: the same bits in every run.
struct OrderedSum {
  const float* from = nullptr;
  Result to{};
  int parts = 0;      // without any: zeros
  int64_t count = 0;  // without any: nothing to do
  int features = 0;   // of a weight gradient whose parts are tiles (tile_of_sums.h); 0: parts lie as the result does
  int apart = 1;      // only every so-many-th part is added, the first with it
};
constexpr int kOrderedSums = 5;  // in one launch
cudaError_t ordered_sums(const OrderedSum (&sums)[kOrderedSums], cudaStream_t stream);

}  // namespace jaxunet::cuda
