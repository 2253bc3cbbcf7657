// The parameters of hopper_weight_gradient_kernel: one or more weight gradients, and their tensor
// maps.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "common/block_ranges.h"
#include "common/fast_divmod.h"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/plan.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda::weight_gradient {

// An image in parts: arrays side by side along their channels, in chunks of 64 channels. No chunk
// crosses from one array into the next.
struct Image {
  int maps;  // index of the first part's tensor map; boxes: 64 channels of a strip
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

// One weight gradient.
struct Member {
  Image x, projected;
  int dy;       // index of its tensor map
  int samples;  // per strip: 1, 2 (one below the other) or 4 (packed)
  int features;
  FastDivmod feature_blocks, x_blocks;  // chunks of dy and of x (at least 1)
  Work kernel, shortcut;                // tiles of 64 × 64 channels, and of block_chunks · 64 × 64
  int shortcut_chunks, block_chunks;    // projected chunks: all; at most per tile
  int height, width;
  FastDivmod strips_of_sample, strips_across;
  // (splits, 3, 3, channels, features), or if `accumulator_tiles`: (splits, tiles) of
  // accumulator_tile.h; (splits, projected channels, features).
  Result partials, shortcut_partials;
  bool accumulator_tiles;
  ShiftPartials shift;

  JAXUNET_HOST_DEVICE int blocks() const { return kernel.blocks() + shortcut.blocks(); }
};

// The kernel's only parameter: up to kMembers weight gradients, each with a range of blocks.
template <int kMembers, int kMaps>
struct Launch {
  static constexpr int kMostMaps = kMaps;
  CUtensorMap maps[kMaps];
  Member members[kMembers];
  BlockRanges<kMembers> ranges;
};
using Alone = Launch<1, 2 * kMaxParts + 1>;
// As many as fit in a kernel's parameters.
using Group = Launch<64, 128>;
static_assert(sizeof(Group) <= 32764, "the most bytes of a kernel's parameters");

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
