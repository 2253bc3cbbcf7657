// The layout of one tile of the Hopper weight gradient, 64 input × 64 output channels of all nine
// taps, as the three consumers hold it in wgmma's accumulators. Partial results that only
// split_k_reduce reads are stored like this: a thread writes four registers at a time, next to
// those of its neighbours.
#pragma once

#include "common/host_device.h"

namespace jaxunet::cuda {

struct AccumulatorTile {
  static constexpr int kThreads = 128;  // of a consumer, which holds a row of taps
  static constexpr int kFours = 24;     // of registers that a thread holds: eight for each tap
  static constexpr int kEntries = 3 * kFours * kThreads * 4;

  // The first of four registers. The second is of the next channel, the third of eight features
  // further on, the fourth of both.
  int tap, channel, feature;

  static JAXUNET_HOST_DEVICE int entry(int tap_row, int four, int thread) {
    return ((tap_row * kFours + four) * kThreads + thread) * 4;
  }
  JAXUNET_HOST_DEVICE explicit AccumulatorTile(int entry) {
    const int thread = entry / 4 % kThreads, four = entry / (4 * kThreads);
    tap = four / 8;
    channel = four % 8 * 8 + thread % 4 * 2;
    feature = thread / 32 * 16 + thread % 32 / 4;
  }
};

}  // namespace jaxunet::cuda
