// A launch that does several jobs at once: each has a range of consecutive blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/host_device.h"

namespace jaxunet::cuda {

// kMost: most jobs, a power of two.
template <int kMost>
struct BlockRanges {
  static_assert((kMost & (kMost - 1)) == 0, "the search halves its range");
  int first[kMost];  // block of each job; beyond all blocks for unused jobs
  int jobs = 0, blocks = 0;

  BlockRanges() { std::fill(first, first + kMost, std::numeric_limits<int>::max()); }
  bool full() const { return jobs == kMost; }
  // Appends a job of at least one block.
  void add(int64_t count) {
    first[jobs++] = blocks;
    blocks += static_cast<int>(count);
  }

  // The job of a block.
  JAXUNET_HOST_DEVICE int job_of(int block) const {
    int job = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int step = kMost / 2; step > 0; step /= 2) job += block >= first[job + step] ? step : 0;
    return job;
  }
};

}  // namespace jaxunet::cuda
