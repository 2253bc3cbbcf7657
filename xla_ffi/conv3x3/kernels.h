// The CUDA kernels of the convolution. They allocate nothing and run on the given stream.
// dispatch.h chooses the kernel of a plan.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "conv3x3/plan.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda {

// Entry points of the handlers: run the best kernel of the set for the shape, type and device.
cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream, KernelSet kernels);
cudaError_t conv3x3_shortcut_gradient(const Conv3x3& plan, cudaStream_t stream, KernelSet kernels);
// Only for plans that takes_upsampled (dispatch.h) accepts; throws std::runtime_error for others.
cudaError_t conv3x3_upsampled(const UpsampledConv3x3& plan, cudaStream_t stream, KernelSet kernels);
cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream,
                                    KernelSet kernels);
// Like conv3x3_upsampled, only for plans that takes_upsampled accepts.
cudaError_t conv3x3_upsampled_weight_gradient(const UpsampledWeightGradient& plan,
                                              cudaStream_t stream, KernelSet kernels);

// portable/: every shape and type, compute capability 8.0 and later. y has one part.
cudaError_t implicit_gemm_forward(const Conv3x3& plan, cudaStream_t stream);
// Writes the partial results of the splits: (splits, 3, 3, channels, features), and for a shortcut
// (splits, projected channels, features).
cudaError_t implicit_gemm_weight_gradient(const Conv3x3WeightGradient& plan, int splits,
                                          float* partials, float* shortcut_partials,
                                          cudaStream_t stream);

// The same for plans that takes_multistage (dispatch.h) accepts. `tile`: an index into
// kMultistageTiles (portable/multistage.h).
cudaError_t multistage_forward(const Conv3x3& plan, int tile, cudaStream_t stream);
cudaError_t multistage_weight_gradient(const Conv3x3WeightGradient& plan, int tile, int splits,
                                       float* partials, float* shortcut_partials,
                                       cudaStream_t stream);

// small_channels/: 16-bit types, compute capability 8.0 and later. At most eight channels, read
// from one array; or at most eight features. The plan has a shift, if only that of `no_shift`.
cudaError_t few_channels_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
cudaError_t few_features_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
// Points `shift` at kMostUnshifted (dispatch.h) zeros in the memory of the current device. They
// stay there as long as the process, so a CUDA graph may read them.
cudaError_t no_shift(Rows* shift);

// hopper/: 16-bit types, compute capability 9.0, built for sm_90a. The parts of y begin at
// multiples of 64 channels.
cudaError_t hopper_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);

// For plans that takes_upsampled (dispatch.h) accepts.
cudaError_t hopper_upsampled(const UpsampledConv3x3& plan, int multiprocessors,
                             cudaStream_t stream);
cudaError_t hopper_upsampled_weight_gradient(const UpsampledWeightGradient& plan,
                                             int multiprocessors, cudaStream_t stream);

// Weight gradients of 16-bit types. Blocks = tiles × splits: a block computes one tile of a
// gradient from the strips of pixels of one split (split_k.h). The shortcut's gradient has tiles
// and splits of its own.
struct WeightGradientTiling {
  int64_t tiles;  // tiles of the kernel's gradient; 0 without x
  int64_t strips_of_sample;
  // Samples per strip, which then holds the same pixels of several images.
  int64_t samples = 1;
  int64_t shortcut_tiles = 0;  // of the shortcut's gradient
  int block_chunks = 0;        // most chunks of 64 projected channels in such a tile
  // Time of a strip and size of the partial results for a tile of the shortcut's gradient, relative
  // to a tile of the kernel's.
  double shortcut_time = 0, shortcut_size = 0;
  // True if no tile extends past the last channel, so that partial results may be accumulator
  // tiles.
  bool whole_tiles = false;
};

// small_channels/: writes the partial results of the splits, (splits, 3, 3, channels, features),
// and partial sums of dy.
WeightGradientTiling few_weight_gradient_tiling(const Conv3x3WeightGradient& plan);
cudaError_t few_weight_gradient(const Conv3x3WeightGradient& plan, const SplitK& split_k,
                                float* partials, const ShiftPartials& shift, cudaStream_t stream);

// hopper/: the same, for one gradient or for several in as few launches as possible. Gradients with
// the same number of samples per strip must be adjacent; those whose blocks take longest should
// come first.
constexpr int kMaxBlockChunks = 6;  // two for each of the three consumer warpgroups
WeightGradientTiling hopper_weight_gradient_tiling(const Conv3x3WeightGradient& plan,
                                                   int max_block_chunks = kMaxBlockChunks);
struct HopperWeightGradient {
  const Conv3x3WeightGradient* plan;  // of one type in all gradients of a call
  WeightGradientTiling tiling;
  SplitK split_k, shortcut_split_k;
  // float32, or if there is one split, of the type of x. With `accumulator_tiles`, which needs
  // whole tiles, the partial results are (splits, tiles) of accumulator_tile.h, in float32. Those
  // of the shortcut are (splits, projected channels, features).
  Result partials, shortcut_partials;
  bool accumulator_tiles;
  ShiftPartials shift;  // without x, the shortcut's blocks sum dy
};
cudaError_t hopper_weight_gradients(const std::vector<HopperWeightGradient>& gradients,
                                    cudaStream_t stream);

// Partial sums of dy for the weight gradients of portable/: (segments, batch, features), where each
// of the `segments` covers a share of every sample's pixels.
cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* partials,
                         cudaStream_t stream);

// to[i] = from[0, i] + from[part_stride, i] + from[2 · part_stride, i] + ..., always in the same
// order, so every run gives the same bits.
struct SplitKReduction {
  const float* from = nullptr;  // (parts, count)
  Result to{};                  // (count)
  int parts = 0;                // 0: the result is zeros
  int64_t count = 0;            // 0: nothing to do
  // The features of the weight gradient if the parts are its accumulator tiles; else 0.
  int features = 0;
  int part_stride = 1;
};
// Runs all reductions in as few launches as possible. Those that take longest should come first.
cudaError_t split_k_reduce(const std::vector<SplitKReduction>& reductions, cudaStream_t stream);

}  // namespace jaxunet::cuda
