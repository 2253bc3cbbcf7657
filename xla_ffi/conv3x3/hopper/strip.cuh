// TMA copies of 64 channels of a strip. The tensor maps have the dimensions (channels, columns,
// rows, samples), or for a packed strip (tile.h) (channels, samples, columns, rows), innermost
// first.
//
// In shared memory, a pixel is a row of 128 bytes, divided into eighths of 16 bytes, eight channels
// each. TMA's 128-byte swizzle puts eighth e of pixel p at eighth e ^ (p % 8), so that the same
// channels of eight pixels lie in different banks.
#pragma once

#include "common/tma.cuh"
#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda {

// `halo`: the width in pixels of the border that is loaded around the strip.
template <bool kPacked>
__device__ inline void load_strip(void* to, const CUtensorMap* map, Barrier* barrier, int channel,
                                  const Strip& at, int halo) {
  if constexpr (kPacked) {
    tma_load(to, map, barrier, channel, at.sample, at.column - halo, at.row - halo);
  } else {
    tma_load(to, map, barrier, channel, at.column - halo, at.row - halo, at.sample);
  }
}

template <bool kPacked>
__device__ inline void store_strip(const CUtensorMap* map, const void* from, int channel,
                                   const Strip& at) {
  if constexpr (kPacked) {
    tma_store(map, from, channel, at.sample, at.column, at.row);
  } else {
    tma_store(map, from, channel, at.column, at.row, at.sample);
  }
}

}  // namespace jaxunet::cuda
