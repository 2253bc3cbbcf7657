// Tiling of statistics.cu, which reduces x to the statistics of its groups in one read: a cluster
// of `ranks` blocks owns whole groups of a sample, all of them if possible, and the rows of its
// blocks (block_reduction.h) take the pixels in turns. On devices without clusters, ranks = 1.
// Grid: (ranks, channel_blocks, batch).
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>

#include "block_reduction.h"

namespace jaxunet {

constexpr int kStatisticsThreads = 512;  // most threads of a block: the kernel's launch bounds

struct StatisticsTiling {
  int pixels, channels;  // per sample
  int ranks;             // blocks per cluster
  int channel_blocks;    // clusters side by side along the channels
  int each, rest;        // pixels per row of threads; how many rows have one more
  BlockReduction block;
  int64_t entry_bytes;  // shared memory for the block's entries
  int64_t slots_at;     // byte offset of the moments of the cluster's blocks
  int64_t smem_bytes;   // shared memory of the block
};

// The tiling for given blocks.
inline StatisticsTiling statistics_tiling_of(int64_t vectors, int64_t threads, int64_t ranks,
                                             int64_t pixels, int64_t channels, int64_t group,
                                             int vector) {
  StatisticsTiling to{};
  to.pixels = static_cast<int>(pixels);
  to.channels = static_cast<int>(channels);
  to.ranks = static_cast<int>(ranks);
  to.channel_blocks = static_cast<int>(channels / (vectors * vector));
  const int64_t rows = std::max<int64_t>(std::min(threads / vectors, ceil_div(pixels, ranks)), 1);
  to.block = block_reduction(vectors, rows, group, vector);
  to.each = static_cast<int>(pixels / (rows * ranks));
  to.rest = static_cast<int>(pixels % (rows * ranks));
  to.entry_bytes = entry_bytes(to.block);
  to.slots_at = to.entry_bytes + operand_bytes(to.block);
  to.smem_bytes = to.slots_at + 8 * ranks * to.block.groups;
  return to;
}

// Predicts the time of a tiling on the busiest multiprocessor, in steps. A step is the time in
// which 512 threads of a multiprocessor read one vector each. `width`: bytes of a vector.
//
// The numbers were fitted on an H200, bfloat16, batch 8 to 256, images of 32x32 and 64x64 with 64
// to 384 channels: the tiling with the least predicted time takes on average 1% longer than the
// fastest, at most 3% from batch 32 on and at most 9% at batch 8. Devices without clusters use the
// same numbers. To refit them, time all tilings (FIT=1, tools/gpu/harness/gnfwd).
inline double statistics_time(const StatisticsTiling& tiling, int64_t batch, int64_t sms,
                              int64_t width) {
  constexpr double kFullThreads = 512;    // threads beyond which reads get no faster
  constexpr double kNarrow = 1.5;         // slowdown of rows shorter than 64 bytes, two sectors
  constexpr double kThread = 24 / 512.0;  // steps to start a thread
  constexpr double kRow = 1 / 32.0;       // steps to merge a row of a block
  constexpr double kTwoBlocks = 12, kMoreBlocks = 16;  // steps to synchronise a cluster
  const BlockReduction& block = tiling.block;
  const auto blocks =
      static_cast<double>(ceil_div(batch * tiling.channel_blocks * tiling.ranks, sms));
  const double threads = blocks * threads_of(block);
  const double vectors =
      blocks * block.vectors * block.rows * (tiling.each + (tiling.rest > 0 ? 1 : 0));
  return vectors / std::min(threads, kFullThreads) * (block.vectors * width < 64 ? kNarrow : 1) +
         kThread * threads + kRow * block.rows +
         (tiling.ranks == 1   ? 0
          : tiling.ranks == 2 ? kTwoBlocks
                              : kMoreBlocks);
}

// The tiling with the least predicted time, among blocks with all channels, half of them and so on,
// as long as these are whole groups. Nothing for images without pixels, if even the smallest block
// has more vectors per pixel than threads or needs more shared memory than there is, or if the
// batch exceeds the grid's z.
inline std::optional<StatisticsTiling> statistics_tiling(const DeviceLimits& limits, int64_t batch,
                                                         int64_t pixels, int64_t channels,
                                                         int64_t group, int vector, int element) {
  if (batch > kMaxGridZ || pixels == 0) return std::nullopt;
  const int64_t max_ranks = has_clusters(limits) ? kPortableCluster : 1;
  const int64_t unit = std::lcm<int64_t>(group, vector) / vector, width = vector * element;
  std::optional<StatisticsTiling> best;
  double least = 0;
  for (int64_t block_vectors = channels / vector;; block_vectors /= 2) {
    for (int64_t threads = std::max<int64_t>(128, block_vectors); threads <= kStatisticsThreads;
         threads *= 2) {
      for (int64_t ranks = 1; ranks <= max_ranks; ranks *= 2) {
        const StatisticsTiling next =
            statistics_tiling_of(block_vectors, threads, ranks, pixels, channels, group, vector);
        if (next.smem_bytes > limits.smem_bytes) continue;
        const double time = statistics_time(next, batch, limits.sms, width);
        if (!best || time < least) {
          best = next;
          least = time;
        }
      }
    }
    if (block_vectors % (2 * unit) != 0 ||
        (block_vectors <= kStatisticsThreads && block_vectors / 2 * width < kSectorBytes))
      break;
  }
  return best;
}

}  // namespace jaxunet
