// Which tiles the flash kernels take, for each type and width of heads; the kernels of one type are one source file.
#pragma once

#include <algorithm>
#include <type_traits>

#include "flash.h"
#include "flash_backward.cuh"
#include "flash_forward.cuh"

namespace jaxunet::cuda {

// Of a head padded to kWidth. Forward: 16-row tiles a warp, warps over rows, warps over keys; keys a tile. Backward:
// 16-row tiles a warp, warps over rows, warps over columns; rows of a passing tile. Last: blocks an SM. Few: one block
// a head, for no more tokens than it has rows; void where such heads take Backward, too, as hardly any network has
// them.
template <class T, int kWidth>
struct Shapes;

template <class T>
struct Shapes<T, 32> {
  using Forward = ForwardShape<T, 32, 2, 4, 1, 64, 2>;
  using Backward = BackwardShape<T, 32, 2, 4, 1, 32, 2>;
  using Few = BackwardShape<T, 32, 1, 4, 1, 64, 2>;
};
template <class T>
struct Shapes<T, 64> {
  using Forward = ForwardShape<T, 64, 2, 4, 1, 32, 2>;
  using Backward = BackwardShape<T, 64, 1, 4, 1, 32, 3>;
  using Few = void;
};
template <class T>
struct Shapes<T, 128> {
  using Forward = ForwardShape<T, 128, 2, 4, 1, 32, 2>;
  using Backward = BackwardShape<T, 128, 1, 8, 1, 32, 1>;
  using Few = void;
};
template <class T>
struct Shapes<T, 256> {
  using Forward = ForwardShape<T, 256, 1, 4, 2, 64, 1>;
  using Backward = BackwardShape<T, 256, 1, 4, 2, 32, 1>;
  using Few = void;
};

template <>
struct Shapes<float, 32> {
  using Forward = ForwardShape<float, 32, 1, 4, 1, 32, 2>;
  using Backward = BackwardShape<float, 32, 1, 4, 1, 32, 2>;
  using Few = void;
};
template <>
struct Shapes<float, 64> {
  using Forward = ForwardShape<float, 64, 1, 4, 1, 32, 2>;
  using Backward = BackwardShape<float, 64, 1, 4, 1, 32, 2>;
  using Few = void;
};
template <>
struct Shapes<float, 128> {
  using Forward = ForwardShape<float, 128, 1, 4, 1, 32, 2>;
  using Backward = BackwardShape<float, 128, 1, 4, 2, 32, 1>;
  using Few = void;
};
template <>
struct Shapes<float, 256> {
  using Forward = ForwardShape<float, 256, 1, 4, 2, 32, 1>;
  using Backward = BackwardShape<float, 256, 1, 2, 4, 64, 1>;
  using Few = void;
};

template <class T, class Visit>
auto with_shapes(int64_t width, Visit visit) {
  if (width <= 32) return visit(Shapes<T, 32>());
  if (width <= 64) return visit(Shapes<T, 64>());
  if (width <= 128) return visit(Shapes<T, 128>());
  return visit(Shapes<T, 256>());
}

template <class Plan>
bool has_flash_shape(const Plan& plan) {
  const auto rows = {reinterpret_cast<uintptr_t>(plan.qkv), reinterpret_cast<uintptr_t>(plan.out)};
  return plan.width % 8 == 0 && plan.width <= 256 && 3 * plan.tokens * plan.heads * plan.width <= INT32_MAX &&
         std::all_of(rows.begin(), rows.end(), [](uintptr_t at) { return at % 16 == 0; });
}

template <class T>
std::optional<cudaError_t> choose_forward(const AttentionForward& plan, int shared_bytes, cudaStream_t stream) {
  if (!has_flash_shape(plan)) return std::nullopt;
  return with_shapes<T>(plan.width, [&](auto shapes) {
    return launch_forward<typename decltype(shapes)::Forward>(plan, shared_bytes, stream);
  });
}

template <class T>
std::optional<cudaError_t> choose_backward(const AttentionBackward& plan, int shared_bytes, cudaStream_t stream) {
  const auto more = {reinterpret_cast<uintptr_t>(plan.grad), reinterpret_cast<uintptr_t>(plan.dqkv)};
  if (!has_flash_shape(plan) || std::any_of(more.begin(), more.end(), [](uintptr_t at) { return at % 16 != 0; })) {
    return std::nullopt;
  }
  return with_shapes<T>(plan.width, [&](auto shapes) {
    using Few = typename decltype(shapes)::Few;
    if constexpr (!std::is_void_v<Few>) {
      if (plan.tokens <= Few::kRows) return launch_backward_few<Few>(plan, shared_bytes, stream);
    }
    return launch_backward<typename decltype(shapes)::Backward>(plan, shared_bytes, stream);
  });
}

}  // namespace jaxunet::cuda
