// Tiling of backward_smem_resident.cu, which reads x and dy once, as far as they fit: a block keeps
// its tile in shared memory while the sums are computed, and writes dx from there.
//
// A block owns `vectors` vectors of neighbouring channels of one sample, whole groups. The `ranks`
// blocks of a cluster take the pixels in turns, `rows` at a time, as in the streaming kernels
// (streaming_tiling.h). On devices without clusters it is one block. A thread has one vector and
// steps of rows * ranks pixels; the last threads idle where rows * vectors is no multiple of 32.
// Steps are copied to shared memory in chunks of `chunk_steps`. The last kBackwardStages chunks
// stay there; earlier ones are copied again for dx. Grid: (ranks, channel_blocks, batch).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/host_device.h"
#include "streaming_tiling.h"
#include "tiling.h"

namespace jaxunet {

constexpr int kBackwardStages = 4;     // chunks in shared memory or on their way; a power of two
constexpr int kBackwardThreads = 512;  // of a block at most
constexpr int kBackwardTeam = 8;       // lanes that add up the rows of one channel, at most

// Staged bytes that a block aims at: two blocks, with their scratch, then share a Hopper
// multiprocessor. One block alone may stage twice as much, which is faster than a cluster of two.
constexpr int64_t kBackwardTileBytes = 104 * 1024, kBackwardSingleBytes = 200 * 1024;

struct BackwardTiling : StreamingTiling {
  int threads;
  int chunk_steps, chunks;             // steps of a chunk; chunks of a block
  int team_bits;                       // log2 of the lanes that add up the rows of one channel
  bool keep;                           // dz replaces dy in shared memory, as float32
  int64_t stage_bytes, scratch_bytes;  // shared memory of the staged chunks, and of everything else
};

// Floats from one row of partial sums to the next: 4 more than a multiple of 8, so that a team's
// lanes, which read 8 rows of 4 channels at once, find different banks.
JAXUNET_HOST_DEVICE inline int partial_stride(int block_channels) {
  return (block_channels + 7) / 8 * 8 + 4;
}

// The decision of choose_backward(), from which the rest of a tiling follows.
struct BackwardChoice {
  int64_t channels;  // of a block
  int ranks, rows;   // of BackwardTiling
};

// Arrays of vectors that a block stages: x and dy, or x and dz, which takes two arrays in 16 bits.
inline int staged_arrays(bool keep, int element) { return keep && element == 2 ? 3 : 2; }

// The tiling that follows from a choice, for blocks with `smem` bytes of shared memory.
inline BackwardTiling make_backward_tiling(int64_t smem, int64_t pixels, int64_t channels,
                                           int64_t group, int vector, int element,
                                           const BackwardChoice& choice) {
  const int64_t block_channels = choice.channels;
  BackwardTiling t{};
  t.pixels = static_cast<int>(pixels);
  t.channels = static_cast<int>(channels);
  t.group = static_cast<int>(group);
  t.vectors = static_cast<int>(block_channels / vector);
  t.ranks = choice.ranks;
  t.channel_blocks = static_cast<int>(ceil_div(channels, block_channels));
  t.piece_bits = piece_bits_of(group, vector);
  // The fewest rows with as many steps as choice.rows takes.
  const int64_t share = std::max<int64_t>(ceil_div(pixels, choice.ranks), 1);
  const int64_t steps = ceil_div(share, choice.rows);
  t.rows = static_cast<int>(ceil_div(share, steps));
  t.threads = static_cast<int>(ceil_div(t.rows * t.vectors, 32) * 32);
  while ((2 << t.team_bits) * block_channels <= t.threads && (2 << t.team_bits) <= kBackwardTeam)
    ++t.team_bits;
  constexpr int64_t kFloat = sizeof(float);
  constexpr int64_t kStageUnit = 96;  // bytes: divides into two or three arrays of whole vectors
  t.scratch_bytes =
      (12 * block_channels + t.rows * partial_stride(static_cast<int>(block_channels))) * kFloat;
  const auto step_bytes = [&](bool keep) {
    return int64_t{staged_arrays(keep, element)} * t.rows * block_channels * element;
  };
  const int64_t room = (smem - t.scratch_bytes) / kStageUnit * kStageUnit;
  const int64_t whole = ceil_div(steps, kBackwardStages);  // chunk_steps where all of them stay
  const auto stays = [&](bool keep) { return step_bytes(keep) * whole * kBackwardStages <= room; };
  t.keep = vector > 1 && stays(true);
  const int64_t ring = std::min(room, kBackwardTileBytes) / step_bytes(false) / kBackwardStages;
  t.chunk_steps = static_cast<int>(stays(t.keep) ? whole : std::max<int64_t>(ring, 1));
  t.chunks = static_cast<int>(ceil_div(steps, t.chunk_steps));
  const int64_t staged = step_bytes(t.keep) * t.chunk_steps * std::min(t.chunks, kBackwardStages);
  t.stage_bytes = ceil_div(staged, kStageUnit) * kStageUnit;
  return t;
}

// The choice for a call. Its numbers were fitted on an H200 in 16 bits; to refit them, time all
// choices with tests/gpu/harness/gnback.
inline BackwardChoice choose_backward(const DeviceLimits& limits, int64_t batch, int64_t pixels,
                                      int64_t channels, int64_t group, int vector, int element) {
  const int64_t unit = std::lcm<int64_t>(group, vector);
  BackwardChoice choice{unit, 1, 1};
  // Channels: a row of 64 bytes, two sectors of memory, if a divisor of at most 256 bytes gives it.
  for (int64_t more = unit;
       choice.channels * element < 64 && more <= channels && more * element <= 256; more += unit)
    if (channels % more == 0) choice.channels = more;
  // Staged bytes of a block that keeps dz; blocks of the grid.
  const auto tile_bytes = [&] {
    return ceil_div(pixels, choice.ranks) * choice.channels * element *
           staged_arrays(vector > 1, element);
  };
  const auto blocks = [&] { return batch * (channels / choice.channels) * choice.ranks; };
  // The cluster's blocks: enough for their tiles to fit, two blocks on a multiprocessor.
  if (tile_bytes() > kBackwardSingleBytes) {
    while (choice.ranks < limits.max_cluster && tile_bytes() > kBackwardTileBytes)
      choice.ranks *= 2;
  }
  // Few samples: larger clusters, while a block keeps 256 pixels and every block gets its own
  // multiprocessor.
  while (choice.ranks < limits.max_cluster && pixels / choice.ranks >= 512 &&
         blocks() * 2 <= limits.sms)
    choice.ranks *= 2;
  // Rows: doubled while a thread still has the steps that it would have if 768 threads on each
  // multiprocessor shared the work (four at most), and while the block leaves threads for a second
  // one, if there is one.
  constexpr int64_t kThreads = 768, kMaxSteps = 4;  // threads of a multiprocessor; of a thread
  const bool single = blocks() <= limits.sms || tile_bytes() > kBackwardTileBytes;
  const int64_t work = ceil_div(batch * pixels * channels / vector, limits.sms * kThreads);
  const int64_t steps = std::min(work, kMaxSteps), share = ceil_div(pixels, choice.ranks);
  const auto block_threads = [&](int64_t rows) { return rows * choice.channels / vector; };
  while (choice.rows * 2 * steps <= share &&
         block_threads(choice.rows * 2) <= (single ? kBackwardThreads : kThreads / 2))
    choice.rows *= 2;
  // Small blocks: more channels, while there are two blocks for a multiprocessor.
  while (block_threads(choice.rows) < 128 && channels % (2 * choice.channels) == 0 &&
         choice.channels * element <= 256 && blocks() >= 4 * limits.sms)
    choice.channels *= 2;
  return choice;
}

// The kernel's tiling, for check().
inline BackwardTiling backward_tiling(const DeviceLimits& limits, int64_t batch, int64_t pixels,
                                      int64_t channels, int64_t group, int vector, int element) {
  BackwardChoice choice = choose_backward(limits, batch, pixels, channels, group, vector, element);
  for (;; choice.rows /= 2) {  // groups of more than a thousand channels: fewer rows
    const BackwardTiling tiling =
        make_backward_tiling(limits.smem_bytes, pixels, channels, group, vector, element, choice);
    if (tiling.stage_bytes + tiling.scratch_bytes <= limits.smem_bytes || choice.rows == 1)
      return tiling;
  }
}

// Bytes of x and dy of a block up to which it may read some of them twice on devices without
// clusters. The second time they are still in L2, if those of all multiprocessors fit it: 33 MiB
// for 132 blocks, one on each multiprocessor of an H100. (They do not in compute capability 8.6,
// whose L2 has at most 6 MiB; there, streaming reads memory twice, too.) Beyond this, streaming
// reads no more from memory, and has no block that waits. Not fitted: whole steps were timed with
// this number (docs/cuda.md), but not both kernels; time them on 32x32 and 64x64 pixels with
// JAXUNET_KERNELS=portable and ada, and on a GPU without clusters.
constexpr int64_t kRereadBytes = 256 * 1024;

// True if one launch of this kernel should run instead of the two streaming launches, for samples
// that have a streaming tiling. `added`: tensors that the kernel adds to dx. Without clusters, up
// to kRereadBytes. With clusters, where it was faster:
//
// One block that holds all pixels of its channels always is (32x32 pixels, 256 channels). A cluster
// is if streaming would read x and dy from memory twice, not from L2, no added tensor takes the
// time that this saves, and two of its blocks share a multiprocessor. On an H200 in bfloat16, 64x64
// pixels, cluster and streaming, us:
//   64 channels, nothing added:                 batch 256 189 and 216, batch 32 33.9 and 33.0
//   64 channels, two added:                     batch 256 287 and 278
//   128 channels, one added:                    batch 256 469 and 471
//   192 channels, one added, blocks of 144 KiB: batch 256 842 and 733
// To refit it, run tests/gpu/harness/gnback.
inline bool faster_than_streaming(const BackwardTiling& tiling, const DeviceLimits& limits,
                                  int64_t batch, int added, int element) {
  constexpr int64_t kBeyondL2Bytes = int64_t{256} << 20;  // of x and dy
  if (!has_clusters(limits)) {
    const int64_t block_channels = tiling.channels / tiling.channel_blocks;
    return tiling.pixels * block_channels * 2 * element <= kRereadBytes;
  }
  if (!tiling.keep) return false;
  if (tiling.ranks == 1) return true;
  const int64_t bytes = batch * tiling.pixels * tiling.channels * 2 * element;
  return element == 2 && added == 0 && bytes >= kBeyondL2Bytes &&
         tiling.stage_bytes <= kBackwardTileBytes;
}

// Throws std::runtime_error if a block cannot hold one group (check_block).
inline void check(const BackwardTiling& tiling, const DeviceLimits& limits) {
  check_block(limits, tiling.group, tiling.threads, kBackwardThreads,
              tiling.stage_bytes + tiling.scratch_bytes);
}

}  // namespace jaxunet
