// Tiling of the smem_resident kernels, which normalise in one launch: a block reads its tile once,
// keeps it in shared memory while the statistics are computed, and writes the result from there.
//
// A block owns `block_channels` neighbouring channels of one sample, whole groups, and all pixels;
// or a share of the pixels, where the blocks of a cluster take one share each and combine their
// statistics through distributed shared memory. Grid: (blocks of the cluster, channel_blocks,
// batch).
//
// Within a block, 1 << lane_bits lanes of a warp, then `warp_columns` warps, lie side by side along
// the channels, one vector each. The other lanes and warps take other pixels: the block reads
// 1 << row_bits pixels at a time, one *step*. Steps are staged in shared memory in chunks of
// `chunk_steps`, of which the last kChunkStages stay.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>

#include "tiling.h"

namespace jaxunet {

// Chunks that a thread has in shared memory or on their way there. A power of two.
constexpr int kChunkStages = 4;

struct SmemResidentTiling {
  int pixels, channels;                // of a sample
  int group;                           // channels of a group
  int vectors;                         // vectors of a pixel in a block
  int lane_bits, warp_columns;         // log2 of the lanes side by side; warps side by side
  int row_bits;                        // log2 of the pixels that a block reads in a step
  int piece_bits;                      // log2 of the channels of a piece (tiling.h)
  int block_pixels, cluster_size;      // pixels of a block; blocks of a cluster
  int chunk_steps, chunks;             // steps of a chunk; chunks of a block
  int channel_blocks, threads;         // blocks side by side along the channels; threads of a block
  int64_t stage_bytes, scratch_bytes;  // shared memory of the staged chunks, and of everything else
};

// The requirements of a kernel for its tiling.
struct KernelNeeds {
  int tensors;      // tensors that stay in shared memory for the epilogue: 0, 1 or 2
  int max_threads;  // threads of a block, unless one pixel's channels already take more
  int64_t row_scratch, scratch;  // scratch bytes of a channel: for each row of warps, and once
};

// Threads of a block at most: the kernels' launch bounds.
constexpr int kSmemResidentThreads = 512;

// Shared memory that a block aims at, in bytes: two blocks then fit the 227 KiB of a Hopper
// multiprocessor.
constexpr int64_t kBlockSmemBytes = 100 * 1024;

// Channels of a block, a multiple of lcm(group, vector).
//
// Global memory is read in sectors of 32 bytes, so more neighbouring channels per block are better:
// rows of 32 bytes are worth a cluster, rows of 64 bytes a larger cluster, and rows of a whole line
// (128 bytes) are taken if they cost nothing. More channels must not leave multiprocessors or lanes
// idle.
template <class Lanes, class ClusterSize>
int64_t choose_block_channels(const DeviceLimits& limits, int64_t batch, int64_t channels,
                              int64_t unit, int element, const Lanes& lanes,
                              const ClusterSize& cluster_size) {
  const auto blocks = [&](int64_t own) {
    return batch * ceil_div(channels, own) *
           std::min<int64_t>(cluster_size(own), limits.max_cluster);
  };
  int64_t own = unit;
  for (int64_t more = 2 * unit; more <= channels && more * element <= 128; more += unit) {
    const bool fits = cluster_size(more) <= limits.max_cluster,
               same = cluster_size(more) == cluster_size(own);
    if (channels % more != 0 || lanes(more) * own > lanes(own) * more || (!fits && !same)) continue;
    const int64_t row = own * element, wanted = row < 64 ? limits.sms * 7 / 8 : limits.sms * 2;
    if (blocks(more) >= wanted && (same || row < 32 || (row < 64 && cluster_size(own) > 1)))
      own = more;
  }
  return own;
}

// log2 of the rows of warps of a block: two to eight steps per thread, if that takes at most half
// of the warps, because few steps are reduced soonest.
inline int choose_warp_row_bits(const SmemResidentTiling& tiling, const KernelNeeds& needs,
                                int warp_pixel_bits) {
  const int64_t rows =
      ceil_div(tiling.block_pixels, int64_t{1} << warp_pixel_bits);  // for one step a thread
  const int64_t half = std::max(needs.max_threads / 64 / tiling.warp_columns, 1);
  int bits = ceil_log2(rows <= 8 * half ? std::min(ceil_div(rows, 2), half) : 2 * half);
  while (bits > 0 && (32 * tiling.warp_columns << bits) > needs.max_threads) --bits;
  return bits;
}

// The tiling for `vector` channels per load and `element` bytes per channel. `group`: channels of a
// group. The numbers in the rules (7/8 of the multiprocessors, 2 of them, 512 pixels) were fitted
// on an H200; to refit them, change one and compare `python -m jaxunet.benchmark.kernels` on the
// cases of group_norm.
inline SmemResidentTiling smem_resident_tiling(const DeviceLimits& limits, const KernelNeeds& needs,
                                               int64_t batch, int64_t pixels, int64_t channels,
                                               int64_t group, int vector, int element) {
  const auto lanes = [&](int64_t own) { return int64_t{1} << ceil_log2(own / vector); };
  const auto cluster_size = [&](int64_t own) {
    const int64_t bytes = lanes(own) * vector * element * pixels * needs.tensors;
    return int64_t{1} << ceil_log2(ceil_div(bytes, kBlockSmemBytes));
  };
  const int64_t unit = std::lcm<int64_t>(group, vector);
  const int64_t own =
      choose_block_channels(limits, batch, channels, unit, element, lanes, cluster_size);
  // Few samples: larger clusters, while a block keeps 512 pixels and every block still gets its own
  // multiprocessor.
  int64_t cluster = std::min<int64_t>(cluster_size(own), limits.max_cluster);
  while (cluster < limits.max_cluster && pixels / cluster >= 512 &&
         batch * ceil_div(channels, own) * cluster * 2 <= limits.sms) {
    cluster *= 2;
  }

  SmemResidentTiling tiling{};
  tiling.pixels = static_cast<int>(pixels);
  tiling.channels = static_cast<int>(channels);
  tiling.group = static_cast<int>(group);
  tiling.vectors = static_cast<int>(own / vector);
  tiling.lane_bits = std::min(ceil_log2(tiling.vectors), 5);
  tiling.warp_columns = static_cast<int>(ceil_div(tiling.vectors, 32));
  tiling.piece_bits = piece_bits_of(group, vector);
  tiling.cluster_size = static_cast<int>(cluster);
  tiling.block_pixels = static_cast<int>(ceil_div(pixels, cluster));
  tiling.channel_blocks = static_cast<int>(ceil_div(channels, own));
  const int warp_pixel_bits = 5 - tiling.lane_bits,
            warp_row_bits = choose_warp_row_bits(tiling, needs, warp_pixel_bits);
  tiling.row_bits = warp_row_bits + warp_pixel_bits;
  tiling.threads = 32 * tiling.warp_columns << warp_row_bits;
  tiling.scratch_bytes = ((needs.row_scratch << warp_row_bits) + needs.scratch) * own;
  // One chunk if there are few steps, else kChunkStages of them, reduced as they arrive; more where
  // they do not fit.
  const int64_t steps = ceil_div(tiling.block_pixels, int64_t{1} << tiling.row_bits);
  const int64_t step_bytes =
      static_cast<int64_t>(tiling.threads) * vector * element * std::max(needs.tensors, 1);
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

// Throws std::runtime_error where a block cannot hold one group: thousands of channels, more than
// any layer normalises together.
inline void check(const SmemResidentTiling& tiling, const DeviceLimits& limits) {
  const int64_t bytes = tiling.stage_bytes + tiling.scratch_bytes;
  if (tiling.threads <= kSmemResidentThreads && bytes <= limits.smem_bytes) return;
  throw std::runtime_error(
      "groups of " + std::to_string(tiling.group) + " channels need " +
      std::to_string(tiling.threads) + " threads and " + std::to_string(bytes) +
      " bytes of shared memory a block, found " + std::to_string(kSmemResidentThreads) + " and " +
      std::to_string(limits.smem_bytes) + "; use more groups, or backend=pallas or xla");
}

}  // namespace jaxunet
