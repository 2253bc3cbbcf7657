// Shared by the two tilings of a GroupNorm: the limits of the device, and integer arithmetic. Host
// code without CUDA, so that tests can call it on a machine without a GPU.
//
// Words: a *vector* is what a thread loads at once, 16 bytes of neighbouring channels of one pixel,
// or one channel if some part's channels are not a multiple of that. A *piece* is 2^n neighbours in
// a vector that always belong to one group.
#pragma once

#include <cstdint>

namespace jaxunet {

struct DeviceLimits {
  int64_t sms;         // streaming multiprocessors
  int64_t smem_bytes;  // shared memory that a block may have
  int max_cluster;     // blocks of a cluster at most; 1 on devices without clusters
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// log2, rounded up.
inline int ceil_log2(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// log2 of a piece, for groups of `group` channels and vectors of `vector` channels.
inline int piece_bits_of(int64_t group, int vector) {
  int bits = 0;
  while ((2 << bits) <= vector && group % (2 << bits) == 0) ++bits;
  return bits;
}

}  // namespace jaxunet
