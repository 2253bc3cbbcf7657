// Tiling of the streaming kernels (forward_streaming.cu, backward_streaming.cu), which normalise
// large samples in two launches that read x once each. The first launch reduces to statistics
// (forward: statistics.cu, with a tiling of its own) or sums (backward), the second computes the
// result. The streaming kernels load, compute and store at the same time and keep only the next few
// steps in shared memory. The second one walks backwards, so it starts with the data that the first
// left in the L2 cache.
//
// streaming_tiling() decides for both passes which samples are large, and is the tiling of the
// first backward launch. second_pass_tiling() is that of the second launches, forward and backward.
//
// A block takes `vectors` vectors of each of its pixels, if possible all channels, so that it reads
// whole lines of memory. Its threads lie along the channels of a pixel, then along the next pixel;
// the last few idle where the pixels do not fit. The `ranks` blocks with the same channels of a
// sample take its pixels in turns, `rows` at a time. Grid: (ranks, channel_blocks, batch).
//
// In a first launch these blocks must add up their sums, so they are a cluster. On devices without
// clusters, a block has all pixels of its channels (ranks = 1), and fewer channels, because there
// would be too few blocks. In a second launch the blocks need nothing from each other.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>

#include "tiling.h"

namespace jaxunet {

constexpr int kStreamingThreads = 256;  // of a block
// Concurrent blocks of a multiprocessor, for which the kernels keep their registers few enough. The
// tilings count on them everywhere, but the 100 KiB of a multiprocessor of compute capability 8.6
// or 8.9 hold only one or two blocks of the second backward launch.
constexpr int kStreamingBlocks = 3;

// Elements of a sample (pixels x channels) from which on two streaming launches are faster than one
// smem_resident launch, whose blocks load, then compute, then store, without overlap. Below it the
// second launch costs more than streaming saves. Fitted on an H200 at batch 32 in 16 bits, with
// clusters alone; to refit it, time both on the cases of group_norm with this number at 0 and at
// its maximum. For some samples above it, faster_than_streaming() chooses one launch all the same.
constexpr int64_t kStreamingMinElements = 192 * 1024;

// A line of memory: rows of more bytes are read no faster.
constexpr int64_t kLineBytes = 128;

struct StreamingTiling {
  int pixels, channels;  // of a sample
  int group;             // channels of a group
  int vectors;           // vectors of a pixel in a block
  int rows;              // pixels that a block reads at a time
  int ranks;             // blocks with the same channels: a cluster in a first launch only
  int channel_blocks;    // blocks side by side along the channels
  int piece_bits;        // log2 of the channels of a piece (tiling.h)
};

// The tiling with blocks of so many channels, `ranks` of them with the same channels of a sample.
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

// The first launch's tiling. Nothing where a kernel that takes one launch should run instead:
// - for samples of less than `min_elements` elements;
// - where more than a quarter of the multiprocessors would have no block;
// - where a pixel has more vectors than a block has threads;
// - where the grid's z could not hold the batch and one layer more (backward_streaming.cu).
inline std::optional<StreamingTiling> streaming_tiling(const DeviceLimits& limits,
                                                       int64_t min_elements, int64_t batch,
                                                       int64_t pixels, int64_t channels,
                                                       int64_t group, int vector, int element) {
  const int64_t unit = std::lcm<int64_t>(group, vector), enough = limits.sms * 3 / 4;
  const int ranks = has_clusters(limits) ? limits.max_cluster : 1;
  int64_t block_channels = channels;
  const auto blocks = [&] { return batch * (channels / block_channels) * ranks; };
  // Halves the channels of a block until there are enough blocks, or its row, its channels of one
  // pixel, would be too short.
  const auto narrow = [&](int64_t wanted_blocks, int64_t row_bytes) {
    while (blocks() < wanted_blocks && block_channels % (2 * unit) == 0 &&
           block_channels / 2 * element >= row_bytes)
      block_channels /= 2;
  };
  if (has_clusters(limits)) {
    narrow(limits.sms, kLineBytes);
  } else {  // one block instead of 8, so fewer channels. Not fitted: time the first launches.
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

// What second_pass_tiling() takes in place of a first launch's tiling if there is no first launch,
// as the convolution before has added up the sums. Nothing where a pixel has more vectors than a
// block has threads.
inline std::optional<StreamingTiling> one_pass_tiling(int64_t pixels, int64_t channels,
                                                      int64_t group, int vector) {
  if (channels / vector > kStreamingThreads) return std::nullopt;
  return tiling_of_blocks(pixels, channels, group, vector, channels, 1);
}

// The second launch's tiling, for a grid of `layers` in z. Its blocks form no clusters, so any
// number of them may share a sample: the number with which the last wave of concurrent blocks ends
// first. With clusters, they have as many channels as those of the first launch. Without, those
// have few channels, so that there are enough blocks; here more ranks give enough, so a block takes
// all channels of a pixel and reads whole lines.
inline StreamingTiling second_pass_tiling(StreamingTiling tiling, const DeviceLimits& limits,
                                          int64_t layers) {
  constexpr int kMaxRanks = 128;
  // A block's prologue takes about as long as three steps of its mainloop on an H200. To refit it,
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
