// The instances of hopper_forward_kernel for one type: every tile of kTiles, flipped and not.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "conv3x3/hopper/forward.cuh"

namespace jaxunet::cuda::forward {

// Launches one instance.
template <class T, class Traits, bool kFlipped>
cudaError_t run(const Conv3x3& plan, int multiprocessors, cudaStream_t stream) {
  const auto filled = std::make_unique<Parameters>();  // large: kept off the stack
  const Parameters& p = *filled;
  cudaError_t error = parameters(Traits::kTile, plan, filled.get());
  if (error != cudaSuccess) return error;
  if (p.schedule.tiles == 0) return cudaSuccess;
  const auto kernel = hopper_forward_kernel<T, Traits, kFlipped>;
  const int bytes = p.schedule.shared_bytes(Traits::kTile);
  error = allow_shared_memory(kernel, kMaxSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(std::min(p.schedule.tiles, multiprocessors)), Traits::kThreads, bytes,
                stream, p);
}

// Tile i of kTiles.
template <int i>
using TraitsOf = TileTraits<kTiles[i].rows, kTiles[i].features, kTiles[i].consumers, kTiles[i].taps,
                            kTiles[i].transposed, kTiles[i].activated, kTiles[i].samples>;

template <class T, int i>
constexpr Launches::Run flipped_run() {
  if constexpr (kTiles[i].activated) {
    return nullptr;
  } else {
    return run<T, TraitsOf<i>, true>;
  }
}

template <class T, int... i>
constexpr Launches launches(std::integer_sequence<int, i...>) {
  return {{run<T, TraitsOf<i>, false>...}, {flipped_run<T, i>()...}};
}

template <class T>
constexpr Launches launches() {
  return launches<T>(std::make_integer_sequence<int, kTileCount>());
}

}  // namespace jaxunet::cuda::forward
