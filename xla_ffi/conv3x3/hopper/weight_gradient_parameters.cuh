// The parameters of hopper_weight_gradient_kernel.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "common/fast_divmod.h"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/plan.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda::weight_gradient {

// An image in parts: arrays side by side along their channels, in chunks of 64 channels. No chunk
// crosses from one array into the next.
struct Image {
  CUtensorMap maps[kMaxParts];            // boxes: 64 channels of a strip
  int parts, channels[kMaxParts], total;  // total: channels of all parts
};

// The work of one of the two gradients: tiles × splits, one block each. `first` and `count` are the
// same as in SplitK, without the divisions.
struct Work {
  int tiles = 0;
  int size, longer;  // strips per split, and how many splits have one more
  FastDivmod by_tiles;
  SplitK split_k;

  Work() = default;
  Work(int64_t tiles_, const SplitK& split_k_)
      : tiles(static_cast<int>(tiles_)),
        size(split_k_.strips / split_k_.splits),
        longer(split_k_.strips % split_k_.splits),
        by_tiles(std::max<int64_t>(tiles_, 1)),
        split_k(split_k_) {}

  JAXUNET_HOST_DEVICE int blocks() const { return tiles * split_k.splits; }
  JAXUNET_HOST_DEVICE int first(int split) const {
    return split * size + (split < longer ? split : longer);
  }
  JAXUNET_HOST_DEVICE int count(int split) const { return size + (split < longer); }
};

// The kernel's only parameter.
struct Parameters {
  Image x, projected;
  CUtensorMap dy;
  int samples;  // per strip: 1, 2 (one below the other) or 4 (packed)
  int features;
  FastDivmod feature_blocks, x_blocks;  // chunks of dy and of x (at least 1)
  Work kernel, shortcut;                // tiles of 64 × 64 channels, and of block_chunks · 64 × 64
  int shortcut_chunks, block_chunks;    // projected chunks: all; at most per tile
  int height, width;
  FastDivmod strips_of_sample, strips_across;
  // (splits, 3, 3, channels, features), or if `accumulator_tiles`: (splits, tiles) of
  // accumulator_tile.h; (splits, projected channels, features).
  float *partials, *shortcut_partials;
  bool accumulator_tiles;
  ShiftPartials shift;
};

// The place of a chunk: its part, its first channel counted in that part, and the part's first
// channel counted through all parts.
struct Place {
  int part = 0, channel = 0, first = 0;

  __device__ Place(const Image& image, int chunk) : channel(chunk * kChunk) {
    while (part + 1 < image.parts && channel >= image.channels[part]) {
      channel -= (image.channels[part] + kChunk - 1) / kChunk * kChunk;
      first += image.channels[part++];
    }
  }
};

}  // namespace jaxunet::cuda::weight_gradient
