// Tiles of the multistage kernels: the list of tiles that they are compiled for, and the choice
// among them. Plain arithmetic, shared by the host, the kernels and tile_choices_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/integers.h"
#include "conv3x3/plan.h"

namespace jaxunet::cuda {

// The outputs of a block, m × n: pixels × features, or for a weight gradient (tap, channel) ×
// features. multistage_tile.cuh describes the other numbers of MULTISTAGE_TILES.
struct MultistageTile {
  int m, n;
  // Estimated speed of a multiprocessor, relative to its speed with the first tile. To refit: the
  // harness prints the time of every tile for every shape.
  double speed;
  // Its speed with only one block, relative to `speed`: four warps hide little latency.
  double alone;
};

// Index; M, N and K of the tile; M and N of a warp; slices; stages; blocks per multiprocessor. A
// multiprocessor with 100 KiB of shared memory (compute capability 8.6 and 8.9) holds fewer blocks:
// two of tile 3, one of tiles 2 and 6.
#define MULTISTAGE_TILES(TILE)           \
  TILE(0, 128, 128, 32, 64, 64, 1, 3, 2) \
  TILE(1, 128, 128, 32, 64, 32, 1, 4, 1) \
  TILE(2, 256, 64, 32, 64, 64, 1, 3, 2)  \
  TILE(3, 128, 64, 32, 64, 32, 1, 4, 3)  \
  TILE(4, 128, 96, 32, 64, 48, 1, 3, 2)  \
  TILE(5, 128, 96, 64, 64, 48, 2, 3, 1)  \
  TILE(6, 64, 64, 64, 32, 32, 2, 4, 2)

// Fitted on an H100 to the shapes of configs/elephants64.py with batches of 32 and 256.
constexpr MultistageTile kMultistageTiles[] = {
    {128, 128, 1.0, 0.55}, {128, 128, 0.95, 1.0}, {256, 64, 0.8, 0.5},  {128, 64, 0.8, 0.65},
    {128, 96, 0.9, 0.4},   {128, 96, 0.85, 0.85}, {64, 64, 0.75, 0.75},
};
constexpr int kMultistageTileCount = sizeof(kMultistageTiles) / sizeof(MultistageTile);
#define SAME_TILE(index, rows, columns, ...) \
  static_assert(kMultistageTiles[index].m == rows && kMultistageTiles[index].n == columns);
MULTISTAGE_TILES(SAME_TILE)
#undef SAME_TILE

constexpr int64_t multistage_blocks(const MultistageTile& tile, int64_t rows, int64_t features) {
  return ceil_div(rows, tile.m) * ceil_div(features, tile.n);
}
// Number of blocks of one split.
constexpr int64_t multistage_blocks(const Conv3x3WeightGradient& plan, int tile) {
  return multistage_blocks(kMultistageTiles[tile], 9 * plan.x.total + plan.projected.total,
                           plan.features);
}

// The estimated time of `blocks` blocks that each compute a tile over K = `depth`: the time of the
// multiprocessor with the most blocks, which it runs in pairs. The unit is a multiprocessor's time
// for one step of K of one output with the first tile.
constexpr double multistage_time(const MultistageTile& tile, int64_t blocks, int multiprocessors,
                                 double depth) {
  const int64_t most = ceil_div(blocks, multiprocessors), last = most % 2;
  const double rounds = static_cast<double>(most - last) + static_cast<double>(last) / tile.alone;
  return rounds * tile.m * tile.n * depth / tile.speed;
}

// The index of the tile with the least estimated time.
constexpr int multistage_tile(const Conv3x3& plan, int multiprocessors) {
  const int64_t pixels = plan.batch * plan.height * plan.width;
  const auto time = [&](const MultistageTile& tile) {
    return multistage_time(tile, multistage_blocks(tile, pixels, plan.features), multiprocessors,
                           1);
  };
  int best = 0;
  for (int i = 1; i < kMultistageTileCount; ++i) {
    if (time(kMultistageTiles[i]) < time(kMultistageTiles[best])) best = i;
  }
  return best;
}

// A tile, the splits of a weight gradient's pixels, and the estimated time.
struct MultistageChoice {
  int tile = 0;
  int64_t splits = 0;
  double time = 0;
};

// The estimated time of a weight gradient whose pixels are divided among `splits` splits.
constexpr double multistage_time(const Conv3x3WeightGradient& plan, int tile, int multiprocessors,
                                 int64_t splits) {
  // The time for a multiprocessor to write its partial results and for split_k_reduce to read them,
  // as the number of pixels that it could multiply instead. Fitted together with the tiles' speeds:
  // the harness times several numbers of splits.
  constexpr double kPartialPixels = 144;
  const int64_t share = ceil_div(plan.batch * plan.height * plan.width, splits);
  return multistage_time(kMultistageTiles[tile], splits * multistage_blocks(plan, tile),
                         multiprocessors, static_cast<double>(share) + kPartialPixels);
}

// The fastest number of splits for a tile, up to `most`, the number that fits in the workspace.
constexpr MultistageChoice multistage_splits(const Conv3x3WeightGradient& plan, int tile,
                                             int multiprocessors, int64_t most) {
  constexpr int64_t kMinPixels = 128;  // per split: enough to fill the ring
  const int64_t pixels = plan.batch * plan.height * plan.width,
                blocks = multistage_blocks(plan, tile);
  // Four blocks per multiprocessor balance the load well enough.
  const int64_t end = std::min({most, std::max<int64_t>(pixels / kMinPixels, 1),
                                std::max<int64_t>(4 * multiprocessors / blocks, 1)});
  MultistageChoice best;
  // This runs at every launch, so it does not try every number of splits. As long as the busiest
  // multiprocessor gets no more blocks, more splits take less time or the same, so at most four
  // numbers need to be tried.
  for (int64_t fewest = 1; fewest <= end;) {
    const int64_t blocks_each = ceil_div(fewest * blocks, multiprocessors),
                  largest = std::min(end, blocks_each * multiprocessors / blocks),
                  share = ceil_div(pixels, largest);
    const int64_t splits = std::max(fewest, ceil_div(pixels, share));  // the fewest with this share
    const double time = multistage_time(plan, tile, multiprocessors, splits);
    if (fewest == 1 || time < best.time) best = {tile, splits, time};
    fewest = largest + 1;
  }
  return best;
}

constexpr MultistageChoice multistage_choice(const Conv3x3WeightGradient& plan, int multiprocessors,
                                             int64_t most) {
  MultistageChoice best = multistage_splits(plan, 0, multiprocessors, most);
  for (int i = 1; i < kMultistageTileCount; ++i) {
    const MultistageChoice choice = multistage_splits(plan, i, multiprocessors, most);
    if (choice.time < best.time) best = choice;
  }
  return best;
}

}  // namespace jaxunet::cuda
