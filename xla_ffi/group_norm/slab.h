// How a normalisation is cut: a block owns some channels of a sample, whole groups of them, and all pixels or, with the
// other blocks of its cluster, a share of them. What it reads waits in shared memory until the statistics are known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>

namespace jaxunet {

constexpr int kRing = 4;  // chunks that a thread has in shared memory, or on their way there

// Lanes of a warp, a power of two, lie beside each other, then `tiles` warps; the others have other pixels.
struct Slab {
  int pixels, channels, group;
  int vectors;            // vectors (16 bytes of channels, or one channel) of a pixel in a block
  int lane_bits, tiles;   // log2 of lanes
  int row_bits;           // log2 of the pixels that a block reads at a time
  int piece_bits;         // log2 of the neighbours in a vector that are always of one group
  int share, ranks;       // pixels of a block; blocks of a cluster, which share the pixels of a sample
  int depth, chunks;      // reads of a thread in a chunk; chunks in all, of which the last kRing stay
  int blocks, threads;    // blocks beside each other
  int64_t held, scratch;  // bytes of shared memory: what is read, and the rest
};

// What a kernel needs of its slab.
struct Need {
  int arrays;                   // tensors that are read again once the statistics are known: 0, 1 or 2
  int threads;                  // of a block, at most; more where a pixel of a group needs them
  int64_t by_warp, by_channel;  // scratch bytes of a channel: for a row of warps, and once
};

// What limits a slab.
struct Limits {
  int64_t processors, shared;  // multiprocessors; bytes of shared memory that a block may have
  int cluster;                 // blocks of a cluster at most: 1 where there are none
};

constexpr int64_t kRoom = 100 * 1024;  // of shared memory, so that a multiprocessor has two blocks

inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

// log2, rounded up.
inline int bits_of(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// The slab for tensors of `vector` channels a load, `element` bytes a channel.
inline Slab cut_slab(const Limits& limits, const Need& need, int64_t batch, int64_t pixels, int64_t channels,
                     int64_t group, int vector, int element) {
  const int64_t unit = std::lcm<int64_t>(group, vector);
  const auto lanes = [&](int64_t own) { return int64_t{1} << bits_of(own / vector); };
  const auto ranks = [&](int64_t own) {
    const int64_t bytes = lanes(own) * vector * element * pixels * need.arrays;
    return int64_t{1} << bits_of(ceil_of(bytes, kRoom));
  };
  const auto blocks = [&](int64_t own) {
    return batch * ceil_of(channels, own) * std::min<int64_t>(ranks(own), limits.cluster);
  };
  // Neighbouring channels come in sectors of 32 bytes: rows of 32 bytes are worth a cluster, rows of 64 a larger one,
  // rows of a whole line (128) are welcome. But no multiprocessor should idle for it, nor more lanes.
  int64_t own = unit;
  for (int64_t more = 2 * unit; more <= channels && more * element <= 128; more += unit) {
    const bool fits = ranks(more) <= limits.cluster, same = ranks(more) == ranks(own);
    if (channels % more != 0 || lanes(more) * own > lanes(own) * more || (!fits && !same)) continue;
    const int64_t row = own * element, wanted = row < 64 ? limits.processors * 7 / 8 : limits.processors * 2;
    if (blocks(more) >= wanted && (same || row < 32 || (row < 64 && ranks(own) > 1))) own = more;
  }
  int64_t spread = std::min<int64_t>(ranks(own), limits.cluster);
  while (spread < limits.cluster && pixels / spread >= 512 &&
         batch * ceil_of(channels, own) * spread * 2 <= limits.processors) {
    spread *= 2;
  }

  Slab slab{};
  slab.pixels = static_cast<int>(pixels);
  slab.channels = static_cast<int>(channels);
  slab.group = static_cast<int>(group);
  slab.vectors = static_cast<int>(own / vector);
  slab.lane_bits = std::min(bits_of(slab.vectors), 5);
  slab.tiles = static_cast<int>(ceil_of(slab.vectors, 32));
  while ((2 << slab.piece_bits) <= vector && group % (2 << slab.piece_bits) == 0) ++slab.piece_bits;
  slab.ranks = static_cast<int>(spread);
  slab.share = static_cast<int>(ceil_of(pixels, spread));
  slab.blocks = static_cast<int>(ceil_of(channels, own));
  // Two to eight reads a thread, if that takes no more than half of the warps: few are soon summed.
  const int rows_of_warp = 5 - slab.lane_bits;
  const int64_t single = ceil_of(slab.share, int64_t{1} << rows_of_warp);  // rows of warps that would read once
  const int64_t half = std::max(need.threads / 64 / slab.tiles, 1);
  int warp_bits = bits_of(single <= 8 * half ? std::min(ceil_of(single, 2), half) : 2 * half);
  while (warp_bits > 0 && (32 * slab.tiles << warp_bits) > need.threads) --warp_bits;
  slab.row_bits = warp_bits + rows_of_warp;
  slab.threads = 32 * slab.tiles << warp_bits;
  slab.scratch = ((need.by_warp << warp_bits) + need.by_channel) * own;
  // One chunk if it is short, else kRing of them, which are summed as they come; more where they do not fit.
  const int64_t steps = ceil_of(slab.share, int64_t{1} << slab.row_bits);
  const int64_t step = static_cast<int64_t>(slab.threads) * vector * element * std::max(need.arrays, 1);
  const int64_t room = std::max<int64_t>(std::min(kRoom, limits.shared - slab.scratch) / step / kRing, 1);
  slab.depth = static_cast<int>(std::max<int64_t>(steps <= kRing ? steps : std::min(ceil_of(steps, kRing), room), 1));
  slab.chunks = static_cast<int>(ceil_of(steps, slab.depth));
  slab.held = step * slab.depth * std::min(slab.chunks, kRing);
  return slab;
}

// Throws where a block cannot hold one group: thousands of channels, beyond what any layer normalises together.
inline void check(const Slab& slab, const Limits& limits) {
  constexpr int kThreads = 1024;  // of a block, on every device
  if (slab.threads <= kThreads && slab.held + slab.scratch <= limits.shared) return;
  throw std::runtime_error("groups of " + std::to_string(slab.group) + " channels need " +
                           std::to_string(slab.threads) + " threads and " + std::to_string(slab.held + slab.scratch) +
                           " bytes of shared memory a block, found " + std::to_string(kThreads) + " and " +
                           std::to_string(limits.shared) + "; use more groups, or backend=pallas or xla");
}

}  // namespace jaxunet
