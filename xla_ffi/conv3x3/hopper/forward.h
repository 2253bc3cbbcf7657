// Shared by the host side of the Hopper forward convolution (forward.cu) and its kernels. The
// kernels are compiled once for each type, in forward_bfloat16.cu, forward_float16.cu and
// forward_wide.cu.
#pragma once

#include "common/fast_divmod.h"
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
  FastDivmod feature_tiles, strips_of_image, strips_across;  // of the schedule
  FastDivmod phase;  // with phases (phases.h): the features of one; flipped, its chunks
  int x_parts, x_channels[kMaxParts], projected_parts, projected_channels[kMaxParts];
  int features, y_parts, y_channels[kMaxParts];
  bool residual;
  Rows shift, a, b;
  // The counter from which blocks draw their tiles; -1: block b computes the tiles b, b +
  // gridDim.x, ...
  int counter;
};

// Parameters of the kernel for float32 results, which uses no tensor maps for y and the residual.
struct WideParameters : Parameters {
  float* wide_y;
  const float* wide_residual;  // null: none
};

inline void set_schedule(const Schedule& schedule, Parameters* p) {
  p->schedule = schedule;
  p->feature_tiles = FastDivmod(schedule.feature_tiles);
  p->strips_of_image = FastDivmod(schedule.strips_down * schedule.strips_across);
  p->strips_across = FastDivmod(schedule.strips_across);
}

constexpr int kTileCounters = 1 << 14;
// Chooses how the blocks of a launch, which writes to y, share the tiles. Returns their number.
int distribute(const void* y, int multiprocessors, Parameters* p);

// Fills in the parameters and encodes the tensor maps. Not a template, so that it is compiled once
// for all instances.
cudaError_t parameters(const Tile& tile, const Conv3x3& plan, Parameters* p);
cudaError_t parameters(const Tile& tile, const Conv3x3& plan, WideParameters* p);

// The launch functions for one type, in the order of kTiles. `forward`: not flipped. Null where
// there is no instance: activated tiles have no flipped kernel and no float32 results.
struct Launches {
  using Run = cudaError_t (*)(const Conv3x3& plan, int multiprocessors, cudaStream_t stream);
  Run forward[kTileCount], flipped[kTileCount];
};
extern const Launches kLaunchesBfloat16, kLaunchesFloat16;
extern const Launches kWideLaunches;  // bfloat16 images, float32 results

}  // namespace jaxunet::cuda::forward
