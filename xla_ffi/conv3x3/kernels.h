// The CUDA kernels of the convolution. They allocate nothing and run on the given stream.
// dispatch.h chooses the kernel of a plan.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3x3/plan.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda {

// The handlers' entries: the best kernel for the shape, the type and the device.
cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream);
cudaError_t conv3x3_shortcut_gradient(const Conv3x3& plan, cudaStream_t stream);
cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream);

// portable/: every shape and type, compute capability 8.0 and later. y has one part.
cudaError_t implicit_gemm_forward(const Conv3x3& plan, cudaStream_t stream);
// Partial results of `splits` splits: (splits, 3, 3, channels, features), and of a shortcut
// (splits, channels projected, features).
cudaError_t implicit_gemm_weight_gradient(const Conv3x3WeightGradient& plan, int splits,
                                          float* partials, float* shortcut_partials,
                                          cudaStream_t stream);

// small_channels/: 16-bit types, compute capability 8.0 and later. At most eight channels, read
// from one array; or at most eight features.
cudaError_t few_channels_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
cudaError_t few_features_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);

// hopper/: 16-bit types, compute capability 9.0, built for sm_90a. The parts of y begin at
// multiples of 64 channels.
cudaError_t hopper_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);

// The division of a weight gradient into blocks.
struct WeightGradientCut {
  int64_t tiles;               // of the kernel's gradient: blocks of one split
  int64_t strips_of_sample;    // strips of pixels, which the splits share
  int64_t shortcut_tiles = 0;  // of the shortcut's gradient
  int block_chunks = 0;        // of 64 projected channels, at most, of such a tile
  int64_t samples = 1;         // that a strip holds: the same pixels of several images
  double shortcut_time =
      0;  // of a strip of the shortcut's gradient, as a share of one of the kernel's
  double shortcut_size = 0;  // of a tile, likewise
  bool whole_tiles =
      false;  // no tile reaches past the channels: partial results may be accumulator tiles
};
// Partial results of the splits, (splits, 3, 3, channels, features), and partial sums of dy
// (split_k.h).
WeightGradientCut few_weight_gradient_cut(const Conv3x3WeightGradient& plan);
cudaError_t few_weight_gradient(const Conv3x3WeightGradient& plan, const SplitK& split_k,
                                float* partials, const ShiftPartials& shift, cudaStream_t stream);
constexpr int kMostChunks = 6;  // of 64 projected channels, of a tile of the shortcut's gradient
WeightGradientCut hopper_weight_gradient_cut(const Conv3x3WeightGradient& plan,
                                             int most_chunks = kMostChunks);
// `accumulator_tiles`: the partial results are (splits, tiles) of accumulator_tile.h; tiles are
// whole. The shortcut has its own splits, and partial results (splits, channels projected,
// features). Without x, its blocks also sum dy.
cudaError_t hopper_weight_gradient(const Conv3x3WeightGradient& plan, const WeightGradientCut& cut,
                                   const SplitK& split_k, float* partials, bool accumulator_tiles,
                                   const ShiftPartials& shift, const SplitK& shortcut_split_k,
                                   float* shortcut_partials, cudaStream_t stream);

// Partial sums of dy over `segments` shares of each sample's pixels, (segments, batch, features).
cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* partials,
                         cudaStream_t stream);

// to[i] = from[0, i] + from[1, i] + ..., always in this order, so every run gives the same bits.
struct SplitKReduction {
  const float* from = nullptr;
  Result to{};
  int parts = 0;      // none: zeros
  int64_t count = 0;  // entries of a part; none: nothing to do
  int features =
      0;  // of a weight gradient whose parts are accumulator tiles; 0: parts lie as the result does
  int part_stride = 1;  // only parts 0, part_stride, 2 · part_stride, ... are added
};
constexpr int kReductions = 5;  // of one launch
cudaError_t split_k_reduce(const SplitKReduction (&reductions)[kReductions], cudaStream_t stream);

}  // namespace jaxunet::cuda
