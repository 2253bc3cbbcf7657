// The multistage kernels of the convolution: 16-bit types, channels and features in multiples of 8,
// compute capability 8.0 and later. Which plans they take, and which tile is fastest.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "conv3x3/dispatch.h"

namespace jaxunet::cuda {

// The tiles of a block, in outputs: pixels × features, or for a weight gradient (tap, channel) ×
// features. multistage_tile.cuh describes the other numbers of MULTISTAGE_TILES.
struct MultistageTile {
  int m, n;
  // Estimated speed of a multiprocessor, as a share of its speed with the first tile. To refit: the
  // harness prints the time of every tile for every shape.
  double speed;
  // Its speed while it has only one block, as a share of `speed`: four warps hide little latency.
  double alone;
};

// M, N, K, M and N of a warp, slices, stages, blocks on a multiprocessor.
#define MULTISTAGE_TILES(TILE)           \
  TILE(0, 128, 128, 32, 64, 64, 1, 3, 2) \
  TILE(1, 128, 128, 32, 64, 32, 1, 4, 1) \
  TILE(2, 256, 64, 32, 64, 64, 1, 3, 2)  \
  TILE(3, 128, 64, 32, 64, 32, 1, 4, 3)  \
  TILE(4, 128, 96, 32, 64, 48, 1, 3, 2)  \
  TILE(5, 128, 96, 64, 64, 48, 2, 3, 1)  \
  TILE(6, 64, 64, 64, 32, 32, 2, 4, 2)

// Not fitted yet: guesses from the bytes that a tile reads for each product, and from the warps
// that hide latency.
constexpr MultistageTile kMultistageTiles[] = {
    {128, 128, 1.0, 0.7}, {128, 128, 0.9, 1.0}, {256, 64, 0.9, 0.7}, {128, 64, 0.85, 0.7},
    {128, 96, 0.9, 0.7},  {128, 96, 0.85, 1.0}, {64, 64, 0.65, 0.8},
};
constexpr int kMultistageTileCount = sizeof(kMultistageTiles) / sizeof(MultistageTile);

constexpr bool takes_multistage(const Conv3x3& plan) {
  return plan.type != Type::kFloat32 && !plan.wide && !plan.a.data && plan.features % 8 == 0 &&
         plan.y.count == 1 && in_eights(plan.x) && in_eights(plan.projected) &&
         in_eights(plan.residual);
}
constexpr bool takes_multistage(const Conv3x3WeightGradient& plan) {
  return plan.type != Type::kFloat32 && plan.features % 8 == 0 && in_eights(plan.x) &&
         in_eights(plan.projected);
}

constexpr int64_t multistage_blocks(const MultistageTile& tile, int64_t rows, int64_t features) {
  return (rows + tile.m - 1) / tile.m * ((features + tile.n - 1) / tile.n);
}

// The time of blocks over K = `depth`, in the outputs that a multiprocessor computes with the first
// tile: that of the multiprocessor with the most blocks. It runs them in pairs.
constexpr double multistage_time(const MultistageTile& tile, int64_t blocks, int multiprocessors,
                                 double depth) {
  const int64_t most = (blocks + multiprocessors - 1) / multiprocessors, last = most % 2;
  const double rounds = static_cast<double>(most - last) + static_cast<double>(last) / tile.alone;
  return rounds * tile.m * tile.n * depth / tile.speed;
}

// The index of the tile with the least estimated time.
inline int multistage_tile(const Conv3x3& plan, int multiprocessors) {
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
  int tile;
  int64_t splits;
  double time;
};

// The fastest number of splits for a tile, at most `most`, which the workspace holds.
inline MultistageChoice multistage_splits(const Conv3x3WeightGradient& plan, int tile,
                                          int multiprocessors, int64_t most) {
  // Pixels whose products take as long as a multiprocessor takes to write its partial results, and
  // split_k_reduce to read them. A guess, to be fitted: the harness times several numbers of
  // splits.
  constexpr double kPartialPixels = 64;
  constexpr int64_t kMinPixels = 128;  // of a split: it fills the ring
  const int64_t pixels = plan.batch * plan.height * plan.width,
                blocks = multistage_blocks(kMultistageTiles[tile],
                                           9 * plan.x.total + plan.projected.total, plan.features);
  MultistageChoice best{};
  // Four blocks for each multiprocessor balance well enough.
  const int64_t end = std::min({most, std::max<int64_t>(pixels / kMinPixels, 1),
                                std::max<int64_t>(4 * multiprocessors / blocks, 1)});
  for (int64_t splits = 1; splits <= end; ++splits) {
    const double share = static_cast<double>((pixels + splits - 1) / splits),
                 time = multistage_time(kMultistageTiles[tile], blocks * splits, multiprocessors,
                                        share + kPartialPixels);
    if (splits == 1 || time < best.time) best = {tile, splits, time};
  }
  return best;
}

inline MultistageChoice multistage_choice(const Conv3x3WeightGradient& plan, int multiprocessors,
                                          int64_t most) {
  MultistageChoice best = multistage_splits(plan, 0, multiprocessors, most);
  for (int i = 1; i < kMultistageTileCount; ++i) {
    const MultistageChoice choice = multistage_splits(plan, i, multiprocessors, most);
    if (choice.time < best.time) best = choice;
  }
  return best;
}

// `tile`: an index of kMultistageTiles.
cudaError_t multistage_forward(const Conv3x3& plan, int tile, cudaStream_t stream);
// Writes the partial results as implicit_gemm_weight_gradient does.
cudaError_t multistage_weight_gradient(const Conv3x3WeightGradient& plan, int tile, int splits,
                                       float* partials, float* shortcut_partials,
                                       cudaStream_t stream);

}  // namespace jaxunet::cuda
