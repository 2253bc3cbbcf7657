// Shared by the host side of the Hopper convolution of upsampled images (upsampled.cu) and its
// kernels, which are compiled once for each type.
#pragma once

#include "conv3x3/hopper/forward.h"
#include "conv3x3/hopper/phases.h"

namespace jaxunet::cuda::forward {

// Fills in the parameters and encodes the tensor maps.
cudaError_t parameters(const Tile& tile, const UpsampledConv3x3& plan, Parameters* p);

// The launch functions for one type, in the order of kPhaseTiles.
struct UpsampledLaunches {
  using Run = cudaError_t (*)(const UpsampledConv3x3& plan, int multiprocessors,
                              cudaStream_t stream);
  Run forward[kPhaseTileCount], flipped[kPhaseTileCount];
};
extern const UpsampledLaunches kUpsampledBfloat16, kUpsampledFloat16;

}  // namespace jaxunet::cuda::forward
