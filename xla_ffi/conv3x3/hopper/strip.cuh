// A strip's way between its images and shared memory, 64 channels of it: through maps of (channels, columns, rows,
// samples), or where it is packed (hopper_tile.h) of (channels, samples, columns, rows).
#pragma once

#include "common/tma.cuh"
#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda {

// With `halo` so many pixels around it as well.
template <bool kPacked>
__device__ inline void load_strip(void* to, const CUtensorMap* map, Barrier* barrier, int channel, const Strip& at,
                                  int halo) {
  if constexpr (kPacked) {
    load_box(to, map, barrier, channel, at.sample, at.column - halo, at.row - halo);
  } else {
    load_box(to, map, barrier, channel, at.column - halo, at.row - halo, at.sample);
  }
}

template <bool kPacked>
__device__ inline void store_strip(const CUtensorMap* map, const void* from, int channel, const Strip& at) {
  if constexpr (kPacked) {
    store_box(map, from, channel, at.sample, at.column, at.row);
  } else {
    store_box(map, from, channel, at.column, at.row, at.sample);
  }
}

}  // namespace jaxunet::cuda
