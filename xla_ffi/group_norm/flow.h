// How a large image is normalised: in two kernels that read it once each, the second backwards, so that it starts with
// what the L2 cache has kept. A block takes all channels of its pixels, which are whole lines of memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "slab.h"

namespace jaxunet {

constexpr int kFlowThreads = 256;
constexpr int kFlowBlocks = 3;  // of a multiprocessor, whose registers the kernels leave room for

// From this many numbers of a sample on, two kernels are faster than a slab (measured on an H200, batch 32, 16 bits):
// its blocks read, then compute, then write, all at the same time, while a flow does all three at once. Smaller samples
// do not pay for what two launches cost.
constexpr int64_t kFlowNumbers = 192 * 1024;

// A block's threads lie beside each other on a pixel, then on the next; the last few idle where pixels do not fit.
struct Flow {
  int pixels, channels, group;
  int vectors;     // of a pixel in a block
  int rows;        // pixels that a block reads at a time
  int ranks;       // blocks of a sample, which take such rows in turns
  int blocks;      // blocks beside each other
  int piece_bits;  // log2 of the neighbours in a vector that are always of one group
};

// The first kernel's flow, or one of no blocks where a slab should be taken: on devices without clusters, whose blocks
// could not add their sums; where it has too few blocks for the device; where a pixel has too many channels; where a
// grid could not have one sample more.
inline Flow cut_flow(const Limits& limits, int64_t least, int64_t batch, int64_t pixels, int64_t channels,
                     int64_t group, int vector, int element) {
  Flow flow{};
  const int64_t unit = std::lcm<int64_t>(group, vector);
  int64_t own = channels;
  const auto few = [&](int64_t processors) { return batch * (channels / own) * limits.cluster < processors; };
  // Rows of 128 bytes are as good as longer ones.
  while (few(limits.processors) && own % (2 * unit) == 0 && own / 2 * element >= 128) own /= 2;
  if (limits.cluster < 8 || pixels * channels < least || few(limits.processors * 3 / 4) ||
      own / vector > kFlowThreads || batch >= 65535) {
    return flow;
  }
  flow.pixels = static_cast<int>(pixels);
  flow.channels = static_cast<int>(channels);
  flow.group = static_cast<int>(group);
  flow.vectors = static_cast<int>(own / vector);
  flow.rows = kFlowThreads / flow.vectors;
  flow.ranks = limits.cluster;
  flow.blocks = static_cast<int>(channels / own);
  while ((2 << flow.piece_bits) <= vector && group % (2 << flow.piece_bits) == 0) ++flow.piece_bits;
  return flow;
}

// The second kernel's, of `samples` grids: as many ranks as are done soonest, in waves of blocks that all run together.
// A block's beginning takes about as long as three of its reads.
inline Flow respread(Flow flow, const Limits& limits, int64_t samples) {
  const int64_t together = limits.processors * kFlowBlocks;
  int64_t best = 0;
  for (int ranks = 1; ranks <= 128; ++ranks) {
    const int64_t reads = ceil_of(flow.pixels, static_cast<int64_t>(flow.rows) * ranks);
    const int64_t time = ceil_of(samples * flow.blocks * ranks, together) * (reads + 3);
    if (best == 0 || time < best) {
      best = time;
      flow.ranks = ranks;
    }
  }
  return flow;
}

}  // namespace jaxunet
