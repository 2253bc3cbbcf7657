// The kernels of one type.
#pragma once

#include <memory>

#include "hopper_forward.cuh"

namespace jaxunet::cuda::forward {

template <class T, class Cut, bool kFlipped>
cudaError_t run(const Conv3x3& plan, int multiprocessors, cudaStream_t stream) {
  const auto all = std::make_unique<Parameters>();
  const Parameters& p = *all;
  cudaError_t error = parameters(Cut::kTile, plan, all.get());
  if (error != cudaSuccess) return error;
  if (p.schedule.tiles == 0) return cudaSuccess;
  const auto kernel = hopper_forward_kernel<T, Cut, kFlipped>;
  const int bytes = p.schedule.shared_bytes(Cut::kTile);
  error = allow_shared_memory(kernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(std::min(p.schedule.tiles, multiprocessors)), Cut::kThreads, bytes, stream, p);
}

template <class T, bool kFlipped, int rows, int features, int groups, int taps, bool transposed, bool activated = false,
          int samples = 1>
Choice choice() {
  using This = Cut<rows, features, groups, taps, transposed, activated, samples>;
  return {This::kTile, kFlipped, run<T, This, kFlipped>};
}

template <class T>
std::vector<Choice> choices() {
  return {
      // flipped, rows, features, groups, taps, transposed, activated, samples: of images of 4 × 4, whose activation is
      // a kernel of its own; four where eight would leave multiprocessors without a tile
      choice<T, false, 16, 64, 2, 3, true>(),          choice<T, true, 16, 64, 2, 3, true>(),
      choice<T, false, 16, 64, 1, 3, true>(),          choice<T, true, 16, 64, 1, 3, true>(),
      choice<T, false, 8, 64, 1, 3, true>(),           choice<T, true, 8, 64, 1, 3, true>(),
      choice<T, false, 8, 128, 1, 1, false>(),         choice<T, true, 8, 128, 1, 1, false>(),
      choice<T, false, 8, 128, 2, 1, false>(),         choice<T, true, 8, 128, 2, 1, false>(),
      choice<T, false, 8, 192, 2, 1, false>(),         choice<T, true, 8, 192, 2, 1, false>(),
      choice<T, false, 8, 192, 1, 1, false>(),         choice<T, true, 8, 192, 1, 1, false>(),
      choice<T, false, 8, 256, 2, 1, false>(),         choice<T, true, 8, 256, 2, 1, false>(),
      choice<T, false, 16, 64, 2, 3, true, true>(),    choice<T, false, 8, 64, 2, 3, true, true>(),
      choice<T, false, 4, 64, 1, 3, true, false, 8>(), choice<T, true, 4, 64, 1, 3, true, false, 8>(),
      choice<T, false, 4, 64, 1, 3, true, false, 4>(), choice<T, true, 4, 64, 1, 3, true, false, 4>(),
  };
}

}  // namespace jaxunet::cuda::forward
