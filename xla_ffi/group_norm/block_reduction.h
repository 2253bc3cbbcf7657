// Shared by statistics_tiling.h and forward_register_resident_tiling.h: blocks whose threads load
// vectors directly into registers and reduce them to moments (moments.cuh).
//
// A block takes `vectors` adjacent vectors of each of its pixels, always whole groups. Threads are
// numbered along the vectors of a pixel, then along the next pixel; a *row* is the threads of one
// pixel. The last few threads of the block's last warp may idle.
#pragma once

#include <cstdint>

#include "common/fast_divmod.h"
#include "tiling.h"

namespace jaxunet {

// Adjacent channels that share one accumulator of a thread. Pairing leaves registers for more loads
// in flight. Kernels for odd groups and for vectors of one channel have one accumulator per
// channel.
constexpr int kPair = 2;

// How a block reduces the moments of its threads to the moments of its groups.
struct BlockReduction {
  int vectors, rows;  // per block
  int group;          // channels per group
  int groups;         // per block
  int piece_bits;     // log2 of the channels of a piece (tiling.h)
  int row_entries;    // entries of a row in shared memory, one a piece; made odd, so that the rows
                      // of a piece lie in different banks
  int team_bits;      // log2 of the lanes that merge one group
  cuda::FastDivmod by_vectors;
};

// The largest team, 8 to 32 lanes, with which the block's warps merge all groups at once.
inline BlockReduction block_reduction(int64_t vectors, int64_t rows, int64_t group, int vector) {
  BlockReduction to{};
  to.vectors = static_cast<int>(vectors);
  to.rows = static_cast<int>(rows);
  to.group = static_cast<int>(group);
  to.groups = static_cast<int>(vectors * vector / group);
  to.piece_bits = piece_bits_of(group, vector);
  to.row_entries = static_cast<int>((vectors * vector) >> to.piece_bits) | 1;
  to.team_bits = 5;
  const int64_t warps = ceil_div(vectors * rows, 32);
  while (to.team_bits > 3 && (warps << (5 - to.team_bits)) < to.groups) --to.team_bits;
  to.by_vectors = cuda::FastDivmod(vectors);
  return to;
}

inline int threads_of(const BlockReduction& block) {
  return static_cast<int>(ceil_div(block.vectors * block.rows, 32) * 32);
}

// Bytes of the entries of all rows, float2 each.
inline int64_t entry_bytes(const BlockReduction& block) {
  return ceil_div(int64_t{8} * block.rows * block.row_entries, 16) * 16;
}

// Bytes of the operands (ChannelOperands): a float for scale and offset of each channel of the
// block, and for the pivot of each group.
inline int64_t operand_bytes(const BlockReduction& block) {
  return ceil_div(int64_t{4} * (2 * block.groups * block.group + block.groups), 16) * 16;
}

}  // namespace jaxunet
