// The layout of one tile of the Hopper weight gradient, 64 input × 64 output channels of all nine
// taps, as the three consumer warpgroups hold it in wgmma's accumulators. Partial results that only
// split_k_reduce reads are stored in this layout: a thread writes four registers at a time,
// contiguous with those of its neighbours.
//
// A consumer's accumulator has the 64 features (output channels) as rows, and three taps × 64
// channels (of x) as columns. Each of its 128 threads holds 96 registers, in fours of two features
// × two channels (wgmma.cuh). A tile is float[3 rows of taps][24 fours][128 threads][4].
#pragma once

#include "common/host_device.h"

namespace jaxunet::cuda {

struct AccumulatorTile {
  static constexpr int kThreads = 128;  // per consumer
  static constexpr int kFours = 24;     // per thread: eight for each tap
  static constexpr int kEntries = 3 * kFours * kThreads * 4;

  // Tap, channel and feature of the first register of a four. The second register has the next
  // channel, the third the feature eight further on, the fourth both.
  int tap, channel, feature;

  // The index in the tile of a four's first entry.
  static JAXUNET_HOST_DEVICE int entry(int tap_row, int four, int thread) {
    return ((tap_row * kFours + four) * kThreads + thread) * 4;
  }
  // The inverse: what the four that begins at `entry` holds.
  JAXUNET_HOST_DEVICE explicit AccumulatorTile(int entry) {
    const int thread = entry / 4 % kThreads, four = entry / (4 * kThreads);
    tap = four / 8;
    channel = four % 8 * 8 + thread % 4 * 2;
    feature = thread / 32 * 16 + thread % 32 / 4;
  }
};

}  // namespace jaxunet::cuda
