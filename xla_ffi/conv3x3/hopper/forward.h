// Between the host's side of Hopper's forward convolution and its kernels, which are compiled once for each type.
#pragma once

#include "conv3x3/hopper/tile.h"
#include "conv3x3/plan.h"
#include "common/tensor_map.h"

namespace jaxunet::cuda::forward {

// The kernel's parameters.
struct Maps {
  CUtensorMap x[kMaxParts], extra[kMaxParts];  // boxes of a strip with its halo
  CUtensorMap kernel, shortcut;                // boxes of a stage
  CUtensorMap residual, y[kMaxParts];          // boxes of 64 channels of a strip
};
struct Parameters {
  Maps maps;
  Schedule schedule;
  int x_parts, x_channels[kMaxParts], extra_parts, extra_channels[kMaxParts];
  int features, y_parts, y_channels[kMaxParts];
  bool residual;
  Rows shift, a, b;
};

cudaError_t parameters(const Tile& tile, const Conv3x3& plan, Parameters* p);

// The launches of one type's kernels, in the order of kTiles; none of an activation in a flipped convolution.
struct Launches {
  using Run = cudaError_t (*)(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
  Run forward[kTileCount], flipped[kTileCount];
};
extern const Launches kLaunchesBfloat16, kLaunchesFloat16;

}  // namespace jaxunet::cuda::forward
