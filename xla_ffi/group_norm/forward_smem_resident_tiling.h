// Tiling of forward_smem_resident.cu, which normalises in one launch: a block reads its tile once,
// keeps it in shared memory while the statistics are computed, and writes y from there.
//
// A block owns adjacent channels of one sample, always whole groups, and all pixels. If these do
// not fit, each block of a cluster takes a share of the pixels, and the blocks combine their
// statistics through distributed shared memory; on devices without clusters, the block reads the
// part that does not fit twice. Grid: (cluster_size, channel_blocks, batch).
//
// Within a block, 1 << lane_bits lanes of a warp cover adjacent vectors of channels, one vector
// each, and so do `warp_columns` warps side by side. The other lanes and warps take other pixels:
// the block reads 1 << row_bits pixels at a time, one *step*. Steps are copied to shared memory in
// chunks of `chunk_steps`. The last kChunkStages chunks stay there; earlier ones are copied again
// for the epilogue.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "tiling.h"

namespace jaxunet {

// Chunks of a thread in shared memory or being copied there. A power of two.
constexpr int kChunkStages = 4;

struct SmemResidentTiling {
  int pixels, channels;                // per sample
  int group;                           // channels per group
  int vectors;                         // vectors per pixel in a block
  int lane_bits, warp_columns;         // log2 of the lanes side by side; warps side by side
  int row_bits;                        // log2 of the pixels that a block reads per step
  int piece_bits;                      // log2 of the channels of a piece (tiling.h)
  int block_pixels, cluster_size;      // pixels per block; blocks per cluster: `ranks` elsewhere
  int chunk_steps, chunks;             // steps per chunk; chunks per block
  int channel_blocks, threads;         // blocks side by side along the channels; threads per block
  int64_t stage_bytes, scratch_bytes;  // shared memory of the staged chunks, and of everything else
};

// Scratch bytes per channel (StatisticsScratch): moments for each row of warps, and once the
// group's moments and five floats.
constexpr int64_t kMomentsBytes = 16, kChannelBytes = 16 + 5 * 4;

constexpr int kSmemResidentThreads = 512;  // most threads of a block: the kernel's launch bounds

// Target for a block's shared memory, in bytes, so that two blocks fit in the 227 KiB of a Hopper
// multiprocessor.
constexpr int64_t kBlockSmemBytes = 100 * 1024;

// Chooses the channels of a block: a multiple of `unit`, the lcm of group and vector. `lanes` and
// `cluster_size` are functions of the channels of a block; they return its lanes side by side and
// its number of blocks per cluster.
//
// Global memory is read in sectors of 32 bytes, so wider rows (a block's channels of one pixel) are
// better. A row of less than 32 bytes is widened even if this needs a larger cluster; a row of less
// than 64 bytes only if it needs a cluster already; and a wider row, up to a whole line (128
// bytes), only if the cluster does not grow. A wider row must not leave more lanes idle, and 7/8 of
// the multiprocessors must still have a block, or two blocks each if the row already has 64 bytes.
template <class Lanes, class ClusterSize>
int64_t choose_block_channels(const DeviceLimits& limits, int64_t batch, int64_t channels,
                              int64_t unit, int element, const Lanes& lanes,
                              const ClusterSize& cluster_size) {
  const auto blocks = [&](int64_t block_channels) {
    return batch * ceil_div(channels, block_channels) *
           std::min<int64_t>(cluster_size(block_channels), limits.max_cluster);
  };
  int64_t block_channels = unit;
  for (int64_t more = 2 * unit; more <= channels && more * element <= 128; more += unit) {
    const bool fits = cluster_size(more) <= limits.max_cluster,
               same = cluster_size(more) == cluster_size(block_channels);
    if (channels % more != 0 || lanes(more) * block_channels > lanes(block_channels) * more ||
        (!fits && !same))
      continue;
    const int64_t row = block_channels * element,
                  wanted = row < 64 ? limits.sms * 7 / 8 : limits.sms * 2;
    if (blocks(more) >= wanted &&
        (same || row < 32 || (row < 64 && cluster_size(block_channels) > 1)))
      block_channels = more;
  }
  return block_channels;
}

// log2 of the rows of warps in a block. A thread takes at least two steps. As long as a thread
// needs at most eight steps, a block uses at most half of its possible warps, because fewer rows
// are faster to reduce; beyond that it uses all of them.
inline int choose_warp_row_bits(const SmemResidentTiling& tiling, int warp_pixel_bits) {
  const int64_t rows =
      ceil_div(tiling.block_pixels, int64_t{1} << warp_pixel_bits);  // for one step per thread
  const int64_t half = std::max(kSmemResidentThreads / 64 / tiling.warp_columns, 1);
  int bits = ceil_log2(rows <= 8 * half ? std::min(ceil_div(rows, 2), half) : 2 * half);
  while (bits > 0 && (32 * tiling.warp_columns << bits) > kSmemResidentThreads) --bits;
  return bits;
}

// The tiling for `vector` channels per load and `element` bytes per channel. `group`: channels of a
// group. `writes_y`: x stays in shared memory for the epilogue; otherwise only statistics are
// wanted.
//
// The numbers in the rules were fitted on an H200; to refit them, change one and compare `python -m
// jaxunet.benchmark.kernels` on the cases of group_norm.
inline SmemResidentTiling smem_resident_tiling(const DeviceLimits& limits, bool writes_y,
                                               int64_t batch, int64_t pixels, int64_t channels,
                                               int64_t group, int vector, int element) {
  const auto lanes = [&](int64_t block_channels) {
    return int64_t{1} << ceil_log2(block_channels / vector);
  };
  const auto cluster_size = [&](int64_t block_channels) {
    const int64_t bytes = writes_y ? lanes(block_channels) * vector * element * pixels : 0;
    return int64_t{1} << ceil_log2(ceil_div(bytes, kBlockSmemBytes));
  };
  const int64_t unit = std::lcm<int64_t>(group, vector);
  const int64_t block_channels =
      choose_block_channels(limits, batch, channels, unit, element, lanes, cluster_size);
  // Few samples: larger clusters, as long as a block keeps at least 256 pixels and every block has
  // a multiprocessor of its own.
  int64_t cluster = std::min<int64_t>(cluster_size(block_channels), limits.max_cluster);
  while (cluster < limits.max_cluster && pixels / cluster >= 512 &&
         batch * ceil_div(channels, block_channels) * cluster * 2 <= limits.sms) {
    cluster *= 2;
  }

  SmemResidentTiling tiling{};
  tiling.pixels = static_cast<int>(pixels);
  tiling.channels = static_cast<int>(channels);
  tiling.group = static_cast<int>(group);
  tiling.vectors = static_cast<int>(block_channels / vector);
  tiling.lane_bits = std::min(ceil_log2(tiling.vectors), 5);
  tiling.warp_columns = static_cast<int>(ceil_div(tiling.vectors, 32));
  tiling.piece_bits = piece_bits_of(group, vector);
  tiling.cluster_size = static_cast<int>(cluster);
  tiling.block_pixels = static_cast<int>(ceil_div(pixels, cluster));
  tiling.channel_blocks = static_cast<int>(ceil_div(channels, block_channels));
  const int warp_pixel_bits = 5 - tiling.lane_bits,
            warp_row_bits = choose_warp_row_bits(tiling, warp_pixel_bits);
  tiling.row_bits = warp_row_bits + warp_pixel_bits;
  tiling.threads = 32 * tiling.warp_columns << warp_row_bits;
  tiling.scratch_bytes = ((kMomentsBytes << warp_row_bits) + kChannelBytes) * block_channels;
  // A few steps make one chunk; more make kChunkStages chunks, each reduced while later ones
  // arrive. If these do not fit in shared memory, there are more chunks, each as large as fits.
  const int64_t steps = ceil_div(tiling.block_pixels, int64_t{1} << tiling.row_bits);
  const int64_t step_bytes = static_cast<int64_t>(tiling.threads) * vector * element;
  const int64_t stage_steps =
      std::max<int64_t>(std::min(kBlockSmemBytes, limits.smem_bytes - tiling.scratch_bytes) /
                            step_bytes / kChunkStages,
                        1);
  tiling.chunk_steps = static_cast<int>(std::max<int64_t>(
      steps <= kChunkStages ? steps : std::min(ceil_div(steps, kChunkStages), stage_steps), 1));
  tiling.chunks = static_cast<int>(ceil_div(steps, tiling.chunk_steps));
  tiling.stage_bytes = step_bytes * tiling.chunk_steps * std::min(tiling.chunks, kChunkStages);
  return tiling;
}

// Throws std::runtime_error if a block cannot hold one group (check_block).
inline void check(const SmemResidentTiling& tiling, const DeviceLimits& limits) {
  check_block(limits, tiling.group, tiling.threads, kSmemResidentThreads,
              tiling.stage_bytes + tiling.scratch_bytes);
}

}  // namespace jaxunet
