// The instances of hopper_forward_kernel for one type, or for float32 results: every tile of
// kTiles, flipped and unflipped.
#pragma once

#include <memory>
#include <utility>

#include "conv3x3/hopper/forward.cuh"

namespace jaxunet::cuda::forward {

// The first array with elements that a launch writes.
inline const void* output_of(const Conv3x3& plan) {
  int part = 0;
  while (part + 1 < plan.y.count && plan.y.channels[part] == 0) ++part;
  return plan.y.data[part];
}
inline const void* output_of(const UpsampledConv3x3& plan) { return plan.y; }

// Launches one instance. `plan`: Conv3x3, or UpsampledConv3x3 for the convolution by phases.
template <class T, class Traits, bool kFlipped, class Plan = Conv3x3>
cudaError_t run(const Plan& plan, int multiprocessors, cudaStream_t stream) {
  using Given = typename Block<T, Traits, kFlipped>::Given;
  const auto filled = std::make_unique<Given>();  // large: kept off the stack
  const Given& p = *filled;
  cudaError_t error = parameters(Traits::kTile, plan, filled.get());
  if (error != cudaSuccess) return error;
  const int blocks = distribute(output_of(plan), multiprocessors, filled.get());
  const auto kernel = hopper_forward_kernel<T, Traits, kFlipped>;
  const int bytes = p.schedule.shared_bytes(Traits::kTile);
  error = allow_shared_memory(kernel, kMaxSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(blocks), Traits::kThreads, bytes, stream, p);
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

template <int i, bool kFlipped>
constexpr Launches::Run wide_run() {
  if constexpr (kTiles[i].activated) {
    return nullptr;
  } else {
    return run<__nv_bfloat16, WithWideResults<TraitsOf<i>>, kFlipped>;
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

template <int... i>
constexpr Launches wide_launches(std::integer_sequence<int, i...>) {
  return {{wide_run<i, false>()...}, {wide_run<i, true>()...}};
}

}  // namespace jaxunet::cuda::forward
