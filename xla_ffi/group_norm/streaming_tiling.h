// Tiling of the streaming kernels (forward_streaming.cu, backward_streaming.cu), which normalise
// large samples in two launches, each of which reads x once. The first launch computes the
// statistics (forward: statistics.cu, with a tiling of its own) or the sums (backward), the second
// the result. The streaming kernels overlap loads, computation and stores, and keep only the next
// few steps in shared memory. The second launch runs in reverse order, so that it starts with the
// data that the first left in the L2 cache.
//
// streaming_tiling() decides which samples are large, for forward and backward, and gives the
// tiling of the first backward launch. second_pass_tiling() gives the tiling of the second launch,
// forward and backward.
//
// A block takes `vectors` vectors of each of its pixels, if possible all channels, so that it reads
// whole lines of memory. Threads are numbered along the channels of a pixel, then along the next
// pixel; the last few idle if they do not make up a whole pixel. The `ranks` blocks with the same
// channels of a sample take its pixels in turns, `rows` at a time. Grid: (ranks, channel_blocks,
// batch).
//
// In the first launch, these blocks must combine their sums, so they form a cluster. On devices
// without clusters, a block has all pixels of its channels (ranks = 1), and fewer channels, because
// otherwise there would be too few blocks. In the second launch the blocks are independent.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>

#include "tiling.h"

namespace jaxunet {

constexpr int kStreamingThreads = 256;  // per block
// Concurrent blocks per multiprocessor that the kernels' registers allow. The tilings assume this
// number everywhere, although the 100 KiB of a multiprocessor of compute capability 8.6 or 8.9 hold
// only one or two blocks of the second backward launch.
constexpr int kStreamingBlocks = 3;

// Elements of a sample (pixels x channels) from which on two streaming launches are faster than one
// smem_resident launch, whose blocks load, then compute, then store, without overlap. For smaller
// samples the second launch costs more than streaming saves. Fitted on an H200 at batch 32 in
// 16-bit types, only with clusters; to refit, time both on the cases of group_norm with this number
// at 0 and at its maximum. For some larger samples, faster_than_streaming() still chooses one
// launch and, forward, so does register_resident_cluster_tiling().
constexpr int64_t kStreamingMinElements = 192 * 1024;

// A line of memory; longer rows are read no faster.
constexpr int64_t kLineBytes = 128;

struct StreamingTiling {
  int pixels, channels;  // per sample
  int group;             // channels per group
  int vectors;           // vectors per pixel in a block
  int rows;              // pixels that a block reads at a time
  int ranks;             // blocks with the same channels: a cluster in the first launch only
  int channel_blocks;    // blocks side by side along the channels
  int piece_bits;        // log2 of the channels of a piece (tiling.h)
};

// The tiling with `block_channels` channels per block and `ranks` blocks per set of channels.
inline StreamingTiling tiling_of_blocks(int64_t pixels, int64_t channels, int64_t group, int vector,
                                        int64_t block_channels, int ranks) {
  StreamingTiling tiling{};
  tiling.pixels = static_cast<int>(pixels);
  tiling.channels = static_cast<int>(channels);
  tiling.group = static_cast<int>(group);
  tiling.vectors = static_cast<int>(block_channels / vector);
  tiling.rows = kStreamingThreads / tiling.vectors;
  tiling.ranks = ranks;
  tiling.channel_blocks = static_cast<int>(channels / block_channels);
  tiling.piece_bits = piece_bits_of(group, vector);
  return tiling;
}

// The first launch's tiling. Nothing if a one-launch kernel should run instead:
// - if a sample has fewer than `min_elements` elements;
// - if more than a quarter of the multiprocessors would have no block;
// - if a pixel has more vectors than a block has threads;
// - if the batch and one more layer (backward_streaming.cu) exceed the grid's z.
inline std::optional<StreamingTiling> streaming_tiling(const DeviceLimits& limits,
                                                       int64_t min_elements, int64_t batch,
                                                       int64_t pixels, int64_t channels,
                                                       int64_t group, int vector, int element) {
  const int64_t unit = std::lcm<int64_t>(group, vector), enough = limits.sms * 3 / 4;
  const int ranks = has_clusters(limits) ? limits.max_cluster : 1;
  int64_t block_channels = channels;
  const auto blocks = [&] { return batch * (channels / block_channels) * ranks; };
  // Halves the channels of a block until there are enough blocks, or until its row (its channels of
  // one pixel) would be too short.
  const auto narrow = [&](int64_t wanted_blocks, int64_t row_bytes) {
    while (blocks() < wanted_blocks && block_channels % (2 * unit) == 0 &&
           block_channels / 2 * element >= row_bytes)
      block_channels /= 2;
  };
  if (has_clusters(limits)) {
    narrow(limits.sms, kLineBytes);
  } else {  // one block, not 8, so fewer channels. Not fitted: time the first launches.
    narrow(limits.sms * kStreamingBlocks, kLineBytes);  // as many blocks as run at once
    narrow(2 * enough, 2 * kSectorBytes);               // about as fast as a line (statistics_time)
    narrow(enough, kSectorBytes);  // slower, but an idle multiprocessor reads nothing
  }
  if (pixels * channels < min_elements || blocks() < enough ||
      block_channels / vector > kStreamingThreads || batch >= kMaxGridZ) {
    return std::nullopt;
  }
  return tiling_of_blocks(pixels, channels, group, vector, block_channels, ranks);
}

// The second launch's tiling, for a grid of `layers` in z. Its blocks form no clusters, so any
// number of ranks may share a sample; it is chosen so that the last wave of concurrent blocks ends
// earliest. With clusters, a block has as many channels as in the first launch. Without clusters,
// the first launch needs blocks of few channels to have enough blocks. Here more ranks give enough,
// so a block takes all channels of a pixel and reads whole lines.
inline StreamingTiling second_pass_tiling(StreamingTiling tiling, const DeviceLimits& limits,
                                          int64_t layers) {
  constexpr int kMaxRanks = 128;
  // On an H200, a block's prologue takes about as long as three steps of its mainloop. To refit,
  // time the second launches with other numbers.
  constexpr int64_t kPrologueSteps = 3;
  const int64_t concurrent = limits.sms * kStreamingBlocks;
  const int vectors = tiling.vectors * tiling.channel_blocks;  // of a pixel
  if (!has_clusters(limits) && vectors <= kStreamingThreads) {
    tiling.vectors = vectors;
    tiling.rows = kStreamingThreads / vectors;
    tiling.channel_blocks = 1;
  }
  int64_t best = 0;
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    const int64_t steps = ceil_div(tiling.pixels, static_cast<int64_t>(tiling.rows) * ranks);
    const int64_t time =
        ceil_div(layers * tiling.channel_blocks * ranks, concurrent) * (steps + kPrologueSteps);
    if (best == 0 || time < best) {
      best = time;
      tiling.ranks = ranks;
    }
  }
  return tiling;
}

}  // namespace jaxunet
