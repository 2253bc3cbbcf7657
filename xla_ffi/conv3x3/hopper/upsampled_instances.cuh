// The instances of hopper_forward_kernel with phases for one type: every tile of kPhaseTiles,
// flipped and unflipped.
#pragma once

#include "conv3x3/hopper/upsampled.h"
// Must follow upsampled.h, which declares the `parameters` that `run` calls.
#include "conv3x3/hopper/forward_instances.cuh"

namespace jaxunet::cuda::forward {

// Tile i of kPhaseTiles.
template <int i>
using PhaseTraitsOf = WithPhases<
    TileTraits<kPhaseTiles[i].rows, kPhaseTiles[i].features, kPhaseTiles[i].consumers,
               kPhaseTiles[i].taps, kPhaseTiles[i].transposed, false, kPhaseTiles[i].samples>>;

template <class T, int... i>
constexpr UpsampledLaunches upsampled_launches(std::integer_sequence<int, i...>) {
  return {{run<T, PhaseTraitsOf<i>, false, UpsampledConv3x3>...},
          {run<T, PhaseTraitsOf<i>, true, UpsampledConv3x3>...}};
}

template <class T>
constexpr UpsampledLaunches upsampled_launches() {
  return upsampled_launches<T>(std::make_integer_sequence<int, kPhaseTileCount>());
}

}  // namespace jaxunet::cuda::forward
