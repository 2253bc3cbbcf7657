// How the sums of one tile of the weight gradient lie, 64 input × 64 output channels of all nine taps, where only the
// addition of the splits' sums reads them: as three warpgroups hold them in wgmma's registers. A thread writes four
// registers at a time, and its neighbours write beside it.
#pragma once

#include "conv3x3/split_k.h"

namespace jaxunet::cuda {

struct TileOfSums {
  static constexpr int kThreads = 128, kFours = 24, kEntries = 3 * kFours * kThreads * 4;

  int tap, channel, feature;  // of the first of four registers; the second is of the next channel, the third of eight
                              // features further on, the fourth of both

  // Where fours of a warpgroup's registers, a row of taps, begin.
  static JAXUNET_HOST_DEVICE int entry(int tap_row, int four, int thread) {
    return ((tap_row * kFours + four) * kThreads + thread) * 4;
  }
  JAXUNET_HOST_DEVICE explicit TileOfSums(int entry) {
    const int thread = entry / 4 % kThreads, four = entry / (4 * kThreads);  // 24 in a row of taps, eight in a tap
    tap = four / 8;
    channel = four % 8 * 8 + thread % 4 * 2;
    feature = thread / 32 * 16 + thread % 32 / 4;
  }
};

}  // namespace jaxunet::cuda
