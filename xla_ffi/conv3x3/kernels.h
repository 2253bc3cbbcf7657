// The convolution's CUDA kernels; they allocate nothing and run on the given stream. `launch.cc` is where one is
// chosen.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

// Handlers' entries: the best kernel for the shape, the type and the device.
cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream);
cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream);

// Every shape and type, on compute capability 8.0 and later.
cudaError_t portable_forward(const Conv3x3& plan, cudaStream_t stream);
// Sums over `splits` shares of the pixels, (splits, 3, 3, channels, features).
cudaError_t portable_weight_gradient(const Conv3x3WeightGradient& plan, int splits, float* sums, cudaStream_t stream);

// Compute capability 9.0: null where the kernel computes this plan, else what stands against it.
const char* hopper_forward_refuses(const Conv3x3& plan);
cudaError_t hopper_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
// How the weight gradient is cut: tiles of the gradient, and strips of pixels that can be divided among splits.
struct WeightGradientCut {
  int64_t blocks, strips;
};
WeightGradientCut hopper_weight_gradient_cut(const Conv3x3WeightGradient& plan);
const char* hopper_weight_gradient_refuses(const Conv3x3WeightGradient& plan);
cudaError_t hopper_weight_gradient(const Conv3x3WeightGradient& plan, int splits, float* sums, cudaStream_t stream);

// Sums of dy over `segments` shares of each sample's pixels, (segments, batch, features).
cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums, cudaStream_t stream);

// to[i] = from[0, i] + from[1, i] + ..., in this order: the same bits in every run.
struct OrderedSum {
  const float* from;
  float* to;
  int parts;
  int64_t count;
};
cudaError_t ordered_sums(const OrderedSum& first, const OrderedSum& second, cudaStream_t stream);

}  // namespace jaxunet::cuda
