// Shared by the host side of the Hopper forward convolution (forward.cu) and its kernels. The
// kernels are compiled once for each type, in forward_bfloat16.cu, forward_float16.cu and
// forward_wide.cu.
#pragma once

#include "common/tensor_map.h"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/plan.h"

namespace jaxunet::cuda::forward {

struct Maps {
  CUtensorMap x[kMaxParts], projected[kMaxParts];  // boxes: 64 channels of a strip with its halo
  CUtensorMap kernel, shortcut;                    // boxes: one stage of weights
  CUtensorMap residual, y[kMaxParts];              // boxes: 64 channels of a strip
};

// The kernel's only parameter.
struct Parameters {
  Maps maps;
  Schedule schedule;
  int x_parts, x_channels[kMaxParts], projected_parts, projected_channels[kMaxParts];
  int features, y_parts, y_channels[kMaxParts];
  bool residual;
  Rows shift, a, b;
};

// That of the input gradient with norm_gradient_epilogue.cuh.
struct NormGradientParameters : Parameters {
  CUtensorMap normed[kMaxParts];  // boxes: 64 channels of a strip of the norm's input
  int normed_parts, normed_channels[kMaxParts];
  // Of the norm, for the epilogue. They hide those of Parameters, which are null: this convolution
  // has no activation.
  Rows a, b;
  float* partial_sums;  // (strips, 2, features)
};

// That of convolutions with float32 results, which have no maps of y and of the residual.
struct WideParameters : Parameters {
  float* wide_y;
  const float* wide_residual;  // null: none
};

// Fills the parameters; encodes the tensor maps. For all instances, so it is compiled once.
cudaError_t parameters(const Tile& tile, const Conv3x3& plan, Parameters* p);
cudaError_t parameters(const Tile& tile, const Conv3x3NormGradient& plan,
                       NormGradientParameters* p);
cudaError_t parameters(const Tile& tile, const Conv3x3& plan, WideParameters* p);

// The launch functions of one type, in the order of kTiles; null where an activated tile would be
// flipped, or a packed one would sum. `forward`: those of the kernel as it is (unflipped).
struct Launches {
  using Run = cudaError_t (*)(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
  using NormGradientRun = cudaError_t (*)(const Conv3x3NormGradient& plan, int multiprocessors,
                                          cudaStream_t stream);
  Run forward[kTileCount], flipped[kTileCount];
  NormGradientRun norm_gradient[kTileCount];
};
extern const Launches kLaunchesBfloat16, kLaunchesFloat16;

// Those of bfloat16 images with float32 results; null for activated tiles.
struct WideLaunches {
  Launches::Run forward[kTileCount], flipped[kTileCount];
};
extern const WideLaunches kWideLaunches;

}  // namespace jaxunet::cuda::forward
