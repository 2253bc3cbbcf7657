// Shared by the tiling rules (*_tiling.h): the limits of the device, and arithmetic. All of them
// are host code without CUDA, so that tests can call them on a machine without a GPU.
//
// A *vector* is what a thread loads at once: 16 bytes of adjacent channels of one pixel, or one
// channel if some part's channels are not a multiple of that. A *piece* is the largest power of two
// of adjacent channels of a vector that always lie in one group.
//
// Names that the tilings share: `channel_blocks` blocks, side by side, have all channels of a
// sample. `ranks` blocks (`cluster_size` in forward_smem_resident_tiling.h) have the same channels
// and divide the pixels. They are a cluster, in which they combine their sums, except in the second
// launch of the streaming kernels, where they are independent.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/integers.h"

namespace jaxunet {

struct DeviceLimits {
  int64_t sms;         // streaming multiprocessors
  int64_t smem_bytes;  // most shared memory per block
  int max_cluster;  // blocks of a cluster at most; 1 if there are no clusters: on GPUs other than
                    // Hopper, and with the portable kernels
};

// Cluster size that every device with clusters supports. CUDA calls it portable; it has nothing to
// do with the portable kernels.
constexpr int kPortableCluster = 8;
constexpr int64_t kMaxGridZ = 65535;  // blocks of a grid along z
constexpr int64_t kSectorBytes = 32;  // the unit of memory reads

// True if blocks can combine their sums within a launch. Without clusters, the kernels that reduce
// a sample assign each of its channels, with all pixels, to one block.
inline bool has_clusters(const DeviceLimits& limits) {
  return limits.max_cluster >= kPortableCluster;
}

// log2, rounded up.
inline int ceil_log2(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// log2 of a piece's channels, for groups of `group` channels and vectors of `vector` channels.
inline int piece_bits_of(int64_t group, int vector) {
  int bits = 0;
  while ((2 << bits) <= vector && group % (2 << bits) == 0) ++bits;
  return bits;
}

// Throws std::runtime_error if a block cannot hold one group of `group` channels: thousands of
// channels, or more than a block has threads if each loads one channel. No real layer has such
// groups.
inline void check_block(const DeviceLimits& limits, int64_t group, int64_t threads,
                        int64_t max_threads, int64_t smem_bytes) {
  if (threads <= max_threads && smem_bytes <= limits.smem_bytes) return;
  throw std::runtime_error("groups of " + std::to_string(group) + " channels need " +
                           std::to_string(threads) + " threads and " + std::to_string(smem_bytes) +
                           " bytes of shared memory a block, found " + std::to_string(max_threads) +
                           " and " + std::to_string(limits.smem_bytes) +
                           "; use more groups, or backend=pallas or xla");
}

}  // namespace jaxunet
