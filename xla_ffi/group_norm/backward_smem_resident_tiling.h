// Tiling of backward_smem_resident.cu, which reads x and dy only once if they fit in shared memory:
// a block keeps its tile there while the sums are computed, and then writes dx.
//
// A block owns `vectors` vectors of adjacent channels of one sample, always whole groups. The
// `ranks` blocks of a cluster take the pixels in turns, `rows` at a time, as in the streaming
// kernels (streaming_tiling.h). On devices without clusters, ranks = 1. A thread has one vector and
// moves rows * ranks pixels per step; the last threads idle if rows * vectors is not a multiple of
// 32. Steps are copied to shared memory in chunks of `chunk_steps`. The last kBackwardStages chunks
// stay there; earlier ones are copied again for dx. Grid: (ranks, channel_blocks, batch).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/host_device.h"
#include "streaming_tiling.h"
#include "tiling.h"

namespace jaxunet {

constexpr int kBackwardStages = 4;     // chunks in shared memory or being copied; a power of two
constexpr int kBackwardThreads = 512;  // most threads of a block
constexpr int kBackwardTeam = 8;       // most lanes that add up the rows of one channel

// Limits for the staged bytes of a block: if two or three of them, with their scratch memory, share
// a Hopper multiprocessor; if it has a multiprocessor to itself; and in a cluster.
constexpr int64_t kBackwardTileBytes = 104 * 1024, kBackwardThirdBytes = 64 * 1024,
                  kBackwardSingleBytes = 200 * 1024, kBackwardClusterBytes = 80 * 1024;

// Shared memory of a multiprocessor that the driver reserves for each block.
constexpr int64_t kReservedBytes = 1024;

struct BackwardTiling : StreamingTiling {
  int threads;
  int chunk_steps, chunks;             // steps per chunk; chunks per block
  int team_bits;                       // log2 of the lanes that add up the rows of one channel
  bool keep;                           // dz replaces dy in shared memory, as float32
  int64_t stage_bytes, scratch_bytes;  // shared memory of the staged chunks, and of everything else
};

// Floats from one row of partial sums to the next: a multiple of 8 plus 4, so that a warp's reads
// of 8 rows × 4 channels have no bank conflicts.
JAXUNET_HOST_DEVICE inline int partial_stride(int block_channels) {
  return (block_channels + 7) / 8 * 8 + 4;
}

// Bytes of the Mailbox (mailbox.cuh) in which a block of a cluster receives two floats for each
// block and channel. Its barrier takes 16 bytes, to keep what follows aligned.
constexpr int kMailboxBarrierBytes = 16;
JAXUNET_HOST_DEVICE inline int mailbox_bytes(int ranks, int block_channels) {
  return ranks == 1
             ? 0
             : kMailboxBarrierBytes + 2 * static_cast<int>(sizeof(float)) * ranks * block_channels;
}

// The choices that choose_backward() makes; the rest of the tiling follows from them.
struct BackwardChoice {
  int64_t channels;  // per block
  int ranks, rows;   // as in BackwardTiling
};

// Number of arrays of vectors that a block stages: x and dy, or x and dz. The float32 dz takes two
// arrays if the elements have 16 bits.
inline int staged_arrays(bool keep, int element) { return keep && element == 2 ? 3 : 2; }

// The tiling for a choice, for blocks with `smem` bytes of shared memory.
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
  // The fewest rows that need no more steps than choice.rows.
  const int64_t share = std::max<int64_t>(ceil_div(pixels, choice.ranks), 1);
  const int64_t steps = ceil_div(share, choice.rows);
  t.rows = static_cast<int>(ceil_div(share, steps));
  t.threads = static_cast<int>(ceil_div(t.rows * t.vectors, 32) * 32);
  while ((2 << t.team_bits) * block_channels <= t.threads && (2 << t.team_bits) <= kBackwardTeam)
    ++t.team_bits;
  constexpr int64_t kFloat = sizeof(float);
  constexpr int64_t kStageUnit = 96;  // bytes: divisible into two or three arrays of whole vectors
  t.scratch_bytes =
      mailbox_bytes(t.ranks, static_cast<int>(block_channels)) +
      (9 * block_channels + t.rows * partial_stride(static_cast<int>(block_channels))) * kFloat;
  const auto step_bytes = [&](bool keep) {
    return int64_t{staged_arrays(keep, element)} * t.rows * block_channels * element;
  };
  const int64_t room = (smem - t.scratch_bytes) / kStageUnit * kStageUnit;
  const int64_t whole = ceil_div(steps, kBackwardStages);  // chunk_steps if every chunk stays
  const auto stays = [&](bool keep) { return step_bytes(keep) * whole * kBackwardStages <= room; };
  t.keep = vector > 1 && stays(true);
  const int64_t ring = std::min(room, kBackwardTileBytes) / step_bytes(false) / kBackwardStages;
  t.chunk_steps = static_cast<int>(stays(t.keep) ? whole : std::max<int64_t>(ring, 1));
  t.chunks = static_cast<int>(ceil_div(steps, t.chunk_steps));
  const int64_t staged = step_bytes(t.keep) * t.chunk_steps * std::min(t.chunks, kBackwardStages);
  t.stage_bytes = ceil_div(staged, kStageUnit) * kStageUnit;
  return t;
}

// The choice for a call with `added` tensors to add to dx. The numbers were fitted for 16-bit types
// without dropout, on an H200, and kBackwardClusterBytes on an H100; to refit them, time all
// choices with tools/gpu/harness/gnback.
inline BackwardChoice choose_backward(const DeviceLimits& limits, int64_t batch, int64_t pixels,
                                      int64_t channels, int64_t group, int vector, int element,
                                      int added) {
  const int64_t unit = std::lcm<int64_t>(group, vector);
  BackwardChoice choice{unit, 1, 1};
  // Channels: rows (one pixel's channels in a block) of at least 64 bytes, two sectors of memory,
  // if a row of at most 256 bytes divides the channels evenly.
  for (int64_t more = unit;
       choice.channels * element < 64 && more <= channels && more * element <= 256; more += unit)
    if (channels % more == 0) choice.channels = more;
  // Staged bytes of a block that keeps dz, and the number of blocks in the grid.
  const auto tile_bytes = [&] {
    return ceil_div(pixels, choice.ranks) * choice.channels * element *
           staged_arrays(vector > 1, element);
  };
  const auto blocks = [&] { return batch * (channels / choice.channels) * choice.ranks; };
  // Blocks per cluster: enough for several blocks to share a multiprocessor. With at most two
  // blocks for each multiprocessor, large blocks that do not share one are as fast. (Not measured
  // in float32.)
  if (tile_bytes() > kBackwardSingleBytes || (element == 2 && blocks() > 2 * limits.sms)) {
    while (choice.ranks < limits.max_cluster && tile_bytes() > kBackwardClusterBytes)
      choice.ranks *= 2;
  }
  // Few samples: larger clusters, as long as a block keeps at least 256 pixels and every block has
  // a multiprocessor of its own.
  while (choice.ranks < limits.max_cluster && pixels / choice.ranks >= 512 &&
         blocks() * 2 <= limits.sms)
    choice.ranks *= 2;
  // More and smaller blocks, so that some load or store while others compute; only where this was
  // measured. Samples that one block could hold get clusters of two, as long as a block keeps 128
  // pixels. Blocks that are small even with twice the channels get these, and so longer rows,
  // except with two added tensors, where shorter rows are faster.
  const bool measured = element == 2 && vector > 1 && has_clusters(limits);
  if (measured && choice.ranks == 1 && pixels >= 256 && blocks() > 2 * limits.sms) {
    choice.ranks = 2;
    if (added < 2 && channels % (2 * choice.channels) == 0 &&
        2 * choice.channels * element <= 256 && 2 * tile_bytes() <= kBackwardThirdBytes)
      choice.channels *= 2;
  }
  // Rows: doubled as long as a thread keeps the number of steps, at most four, that it has with 768
  // threads on each multiprocessor, for which there are registers, and as long as the blocks that
  // share a multiprocessor have no more threads: one block, or two if there are two and they fit.
  constexpr int64_t kThreads = 768, kMaxSteps = 4;  // per multiprocessor; per thread
  const int64_t work = ceil_div(batch * pixels * channels / vector, limits.sms * kThreads);
  const int64_t steps = std::min(work, kMaxSteps), share = ceil_div(pixels, choice.ranks);
  const auto block_threads = [&](int64_t rows) { return rows * choice.channels / vector; };
  const auto rows_for = [&](int64_t sharing) {
    const int64_t most = std::min<int64_t>(kThreads / sharing, kBackwardThreads);
    int rows = 1;
    while (rows * 2 * steps <= share && block_threads(rows * 2) <= most) rows *= 2;
    return rows;
  };
  choice.rows = rows_for(blocks() <= limits.sms || tile_bytes() > kBackwardTileBytes ? 1 : 2);
  // Small blocks: more channels, as long as each multiprocessor has two blocks.
  while (block_threads(choice.rows) < 128 && channels % (2 * choice.channels) == 0 &&
         choice.channels * element <= 256 && blocks() >= 4 * limits.sms)
    choice.channels *= 2;
  // Fewer rows, if three or four blocks then share a multiprocessor; not four if two tensors are
  // added, because more threads are needed to hide the latency of loading those into registers.
  const int most = !measured ? 2 : added < 2 ? 4 : 3;
  for (int sharing = 3; sharing <= most && blocks() > (sharing - 1) * limits.sms; ++sharing) {
    const BackwardChoice smaller{choice.channels, choice.ranks, rows_for(sharing)};
    const BackwardTiling t =
        make_backward_tiling(limits.smem_bytes, pixels, channels, group, vector, element, smaller);
    const int64_t bytes = t.stage_bytes + t.scratch_bytes + kReservedBytes;
    if (sharing * bytes <= limits.smem_bytes + kReservedBytes) choice = smaller;
  }
  return choice;
}

// The kernel's tiling, for check().
inline BackwardTiling backward_tiling(const DeviceLimits& limits, int64_t batch, int64_t pixels,
                                      int64_t channels, int64_t group, int vector, int element,
                                      int added) {
  BackwardChoice choice =
      choose_backward(limits, batch, pixels, channels, group, vector, element, added);
  for (;; choice.rows /= 2) {  // fewer rows for groups of more than a thousand channels
    const BackwardTiling tiling =
        make_backward_tiling(limits.smem_bytes, pixels, channels, group, vector, element, choice);
    if (tiling.stage_bytes + tiling.scratch_bytes <= limits.smem_bytes || choice.rows == 1)
      return tiling;
  }
}

// On devices without clusters, a block with at most this many bytes of x and dy may take this
// kernel even if it must read some of them twice. The second reads hit L2 if the tiles of all
// multiprocessors fit there: 33 MiB for 132 blocks, one on each multiprocessor of an H100. (They do
// not fit in compute capability 8.6, whose L2 has at most 6 MiB; but streaming reads memory twice
// there, too.) For larger tiles, streaming reads no more from memory, and none of its blocks waits.
// Not fitted: whole training steps were timed with this number (docs/cuda.md), but the two kernels
// were not compared; time them on 32x32 and 64x64 pixels with JAXUNET_KERNELS=portable and ada, and
// on a GPU without clusters.
constexpr int64_t kRereadBytes = 256 * 1024;

// True if one launch of this kernel should replace the two streaming launches, for samples that
// have a streaming tiling. Without clusters, kRereadBytes decides. With clusters, this kernel is
// faster if it reads x and dy only once. Of 13 calls that need a cluster, with 32 to 256 samples of
// 32x32 or 64x64 pixels, it took 0.72 to 0.93 of the time of streaming in 12, and 1.05 in one (32
// samples of 64x64 pixels, 64 channels, two added tensors), on an H100 in bfloat16. On an H200, it
// took 0.76 to 0.97 of the time of the streaming kernels that use no clusters at batch 256, and
// 0.81 to 1.00 at 32 (32d48c0f). To measure again, run tools/gpu/harness/gnback; its baseline
// streams with clusters if it is a checkout in which this function returns false. Clusters in
// float32 were not measured.
inline bool faster_than_streaming(const BackwardTiling& tiling, const DeviceLimits& limits,
                                  int element) {
  if (!has_clusters(limits)) {
    const int64_t block_channels = tiling.channels / tiling.channel_blocks;
    return tiling.pixels * block_channels * 2 * element <= kRereadBytes;
  }
  return tiling.keep && (tiling.ranks == 1 || element == 2);
}

// Throws std::runtime_error if a block cannot hold one group (check_block).
inline void check(const BackwardTiling& tiling, const DeviceLimits& limits) {
  check_block(limits, tiling.group, tiling.threads, kBackwardThreads,
              tiling.stage_bytes + tiling.scratch_bytes);
}

}  // namespace jaxunet
