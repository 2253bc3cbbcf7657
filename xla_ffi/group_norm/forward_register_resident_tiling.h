// Tiling of forward_register_resident.cu: GroupNorm forward in one launch, for samples so small
// that one block, or a cluster of `ranks` blocks, can hold all pixels of some groups. Each thread
// loads all of its pixels at once, at most kMaxThreadPixels vectors, and keeps them in registers
// until y is written. The rows of threads of all blocks of a cluster take the pixels in turns
// (RowPixels, moments.cuh). Grid: (ranks, channel_blocks, batch).
#pragma once

#include <numeric>
#include <optional>

#include "block_reduction.h"

namespace jaxunet {

constexpr int kRegisterResidentThreads = 512;  // most per block: the kernel's launch bounds
constexpr int kMaxThreadPixels = 8;            // most pixels per thread

struct RegisterResidentTiling {
  int pixels, channels;  // per sample
  int thread_pixels;     // most per thread: the kernel's 2, 4 or 8
  int ranks;             // blocks per cluster
  int channel_blocks;    // blocks, or clusters, side by side along the channels
  int each, rest;        // pixels per row of threads; how many rows have one more
  int stride;            // pixels from one of a thread to its next: the rows of all ranks
  BlockReduction block;
  int64_t entry_bytes;  // shared memory for the block's entries
  int64_t slots_at;     // byte offset of the moments of the cluster's blocks
  int64_t smem_bytes;   // shared memory of the block
};

// The tiling for given blocks; nothing if a block would be too large.
inline std::optional<RegisterResidentTiling> register_resident_tiling_of(
    int64_t vectors, int64_t thread_pixels, int64_t pixels, int64_t channels, int64_t group,
    int vector, int64_t ranks = 1) {
  const int64_t rows = ceil_div(pixels, thread_pixels * ranks);
  if (vectors * rows > kRegisterResidentThreads) return std::nullopt;
  RegisterResidentTiling to{};
  to.pixels = static_cast<int>(pixels);
  to.channels = static_cast<int>(channels);
  to.thread_pixels = static_cast<int>(thread_pixels);
  to.ranks = static_cast<int>(ranks);
  to.channel_blocks = static_cast<int>(channels / (vectors * vector));
  to.block = block_reduction(vectors, rows, group, vector);
  to.stride = static_cast<int>(rows * ranks);
  to.each = static_cast<int>(pixels / to.stride);
  to.rest = static_cast<int>(pixels % to.stride);
  to.entry_bytes = entry_bytes(to.block);
  to.slots_at = to.entry_bytes + operand_bytes(to.block);
  to.smem_bytes = to.slots_at + (ranks > 1 ? 8 * ranks * to.block.groups : 0);
  return to;
}

// The tiling; nothing if the kernel does not accept the call: vectors of one channel, groups of an
// odd number of channels, no pixels, or more pixels than one block can hold.
//
// - Pixels per thread: 8 if the grid then has 16 warps per multiprocessor, or 8 warps and blocks of
//   at least 16 rows; otherwise 4 if 8 pixels would give 4 warps per multiprocessor; otherwise 2.
//   Doubled, up to 8, while a block would have more than 384 threads.
// - Channels per block: the fewest for which a row (the block's channels of one pixel) is at least
//   64 bytes of whole sectors, and the block has two or more warps, all of them full. Fewer (but at
//   least one sector) if that many would leave more than 1/8 of the multiprocessors without a
//   block, or would need more than 384 threads although the row already has 64 bytes.
//
// The numbers were fitted on an H200, bfloat16, batch 1 to 256, images of 4x4 to 32x32 with 128 to
// 512 channels: the chosen tiling takes at most 3% longer than the fastest. To refit them, time all
// tilings (FIT=1, tools/gpu/harness/gnfwd).
inline std::optional<RegisterResidentTiling> register_resident_tiling(const DeviceLimits& limits,
                                                                      int64_t batch, int64_t pixels,
                                                                      int64_t channels,
                                                                      int64_t group, int vector,
                                                                      int element) {
  constexpr int64_t kGoodThreads = 384;  // of a block
  constexpr int64_t kRowBytes = 64;
  if (vector == 1 || group % kPair != 0 || pixels == 0) return std::nullopt;
  const int64_t unit = std::lcm<int64_t>(group, vector) / vector, all = channels / vector;
  const int64_t warps = batch * all * pixels / 8 / 32;  // in the grid, with 8 pixels per thread
  const bool eight = warps >= 16 * limits.sms || (warps >= 8 * limits.sms && pixels >= 16 * 8);
  const int64_t fewest = eight ? 8 : warps >= 4 * limits.sms ? 4 : 2;
  std::optional<RegisterResidentTiling> best;
  for (int64_t block_vectors = unit; block_vectors <= all; block_vectors += unit) {
    if (all % block_vectors != 0) continue;
    const int64_t best_bytes = best ? int64_t{best->block.vectors} * vector * element : 0;
    int64_t k = fewest;
    while (k < kMaxThreadPixels && block_vectors * ceil_div(pixels, k) > kGoodThreads) k *= 2;
    const int64_t threads = block_vectors * ceil_div(pixels, k),
                  bytes = block_vectors * vector * element;
    const auto next =
        register_resident_tiling_of(block_vectors, k, pixels, channels, group, vector);
    if (!next || (threads > kGoodThreads && best_bytes >= kRowBytes)) break;
    if (best_bytes >= kSectorBytes && 8 * batch * next->channel_blocks < 7 * limits.sms) break;
    best = next;
    if (bytes >= kRowBytes && bytes % kSectorBytes == 0 && threads >= 64 && threads % 32 == 0)
      break;
  }
  return best;
}

// The tiling with clusters, for large samples; nothing if there are no clusters, or if the kernel
// does not accept the call: as for register_resident_tiling(), more pixels than a cluster can
// hold, or no rows of whole sectors.
//
// A block has the fewest channels for which a row is at least 64 bytes of whole sectors. Clusters
// are as small as blocks of 256 threads allow, so that four blocks share a multiprocessor; larger
// blocks only where the largest clusters need them. Of all tilings, this one takes at most 9%
// longer than the fastest for large images of elephants64, with 32 and 256 samples in bfloat16 on
// an H200, and 0.72 to 1.01 of the time of streaming (1.07 for 32 samples of 64x64 pixels with 192
// channels). To time all, run tools/gpu/harness/gnfwd.
inline std::optional<RegisterResidentTiling> register_resident_cluster_tiling(
    const DeviceLimits& limits, int64_t pixels, int64_t channels, int64_t group, int vector,
    int element) {
  constexpr int64_t kRowBytes = 64, kGoodThreads = 256;
  if (!has_clusters(limits) || vector == 1 || group % kPair != 0 || pixels == 0)
    return std::nullopt;
  const int64_t unit = std::lcm<int64_t>(group, vector) / vector, all = channels / vector;
  for (int64_t vectors = unit; vectors <= all; vectors += unit) {
    const int64_t bytes = vectors * vector * element;
    if (all % vectors != 0 || bytes < kRowBytes || bytes % kSectorBytes != 0) continue;
    int64_t ranks = 2;
    while (ranks < kPortableCluster &&
           vectors * ceil_div(pixels, kMaxThreadPixels * ranks) > kGoodThreads)
      ranks *= 2;
    return register_resident_tiling_of(vectors, kMaxThreadPixels, pixels, channels, group, vector,
                                       ranks);
  }
  return std::nullopt;
}

// True if one launch of this kernel should replace the two streaming launches, for samples that
// have both tilings. With clusters, it is always false: large samples take a cluster (above) or
// stream. Without clusters, it is true unless two blocks would read each sector because a block
// holds only one vector of a pixel (64x64 pixels). Not fitted: whole training steps were timed with
// this rule (docs/cuda.md), but the two kernels were not compared; time them with
// JAXUNET_KERNELS=portable, and on a GPU without clusters.
inline bool faster_than_streaming(const RegisterResidentTiling& tiling, const DeviceLimits& limits,
                                  int vector, int element) {
  return !has_clusters(limits) && tiling.block.vectors * vector * element >= kSectorBytes;
}

}  // namespace jaxunet
