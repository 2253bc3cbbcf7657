// Which tiles the flash kernels take, for each type and width of heads; the kernels of one type are one source file.
#pragma once

#include <algorithm>

#include "flash.h"
#include "flash_backward.cuh"
#include "flash_forward.cuh"

namespace jaxunet::cuda {

// Shapes for few tokens, those with the fewest rows first.
template <class... Shape>
struct Few {};

// Where hardly any network has heads of few tokens, those take the general shapes, too.
struct NoFew {
  using FewForward = Few<>;
  using FewBackward = Few<>;
};

// Of a head padded to kWidth. Forward: 16-row tiles a warp, warps over rows, warps over keys; keys a tile. Backward:
// 16-row tiles a warp, warps over rows, warps over columns; rows of a passing tile. Then: blocks an SM. Last, where a
// forward shape has it: warps over columns. The few take one block a head, for no more tokens than it has rows; that of
// backward finds all gradients. Of 16 bits, those that the attention of configs/elephants64.py and configs/cifar10.py
// takes were chosen on an H200, by the geometric mean of the times at batch 32 and 256.
template <class T, int kWidth>
struct Shapes;

template <class T>
struct Shapes<T, 32> {
  using Forward = ForwardShape<T, 32, 2, 4, 1, 64, 3>;
  using FewForward = Few<ForwardShape<T, 32, 1, 4, 1, 64, 4>>;
  using Backward = BackwardShape<T, 32, 2, 4, 1, 32, 2>;
  using FewBackward = Few<BackwardShape<T, 32, 1, 4, 1, 32, 4>, BackwardShape<T, 32, 2, 8, 1, 64, 1>>;
};
template <class T>
struct Shapes<T, 64> : NoFew {
  using Forward = ForwardShape<T, 64, 2, 4, 1, 32, 2>;
  using Backward = BackwardShape<T, 64, 1, 4, 1, 32, 3>;
};
template <class T>
struct Shapes<T, 128> : NoFew {
  using Forward = ForwardShape<T, 128, 2, 4, 1, 32, 2>;
  using Backward = BackwardShape<T, 128, 1, 8, 1, 32, 1>;
};
template <class T>
struct Shapes<T, 256> {
  using Forward = ForwardShape<T, 256, 1, 4, 1, 32, 2>;
  using FewForward = Few<ForwardShape<T, 256, 1, 1, 1, 16, 1, 4>>;
  using Backward = BackwardShape<T, 256, 2, 2, 4, 64, 1>;
  using FewBackward = Few<BackwardShape<T, 256, 1, 1, 4, 16, 1>>;
};

template <>
struct Shapes<float, 32> : NoFew {
  using Forward = ForwardShape<float, 32, 1, 4, 1, 32, 2>;
  using Backward = BackwardShape<float, 32, 1, 4, 1, 32, 2>;
};
template <>
struct Shapes<float, 64> : NoFew {
  using Forward = ForwardShape<float, 64, 1, 4, 1, 32, 2>;
  using Backward = BackwardShape<float, 64, 1, 4, 1, 32, 2>;
};
template <>
struct Shapes<float, 128> : NoFew {
  using Forward = ForwardShape<float, 128, 1, 4, 1, 32, 2>;
  using Backward = BackwardShape<float, 128, 1, 4, 2, 32, 1>;
};
template <>
struct Shapes<float, 256> : NoFew {
  using Forward = ForwardShape<float, 256, 1, 4, 2, 32, 1>;
  using Backward = BackwardShape<float, 256, 1, 2, 4, 64, 1>;
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

// run(shape) of the first shape that has a row for each token and fits the device's shared memory; nothing where none
// does.
template <class... Shape, class Run>
std::optional<cudaError_t> run_few(Few<Shape...>, int64_t tokens, Run run) {
  std::optional<cudaError_t> done;
  static_cast<void>((... || (tokens <= Shape::kRows && (done = run(Shape())))));
  return done;
}

template <class T>
std::optional<cudaError_t> choose_forward(const AttentionForward& plan, int shared_bytes, cudaStream_t stream) {
  if (!has_flash_shape(plan)) return std::nullopt;
  return with_shapes<T>(plan.width, [&](auto shapes) {
    using All = decltype(shapes);
    const auto run = [&](auto shape) { return launch_forward<decltype(shape)>(plan, shared_bytes, stream); };
    const auto done = run_few(typename All::FewForward(), plan.tokens, run);
    return done ? done : run(typename All::Forward());
  });
}

template <class T>
std::optional<cudaError_t> choose_backward(const AttentionBackward& plan, int shared_bytes, cudaStream_t stream) {
  const auto more = {reinterpret_cast<uintptr_t>(plan.grad), reinterpret_cast<uintptr_t>(plan.dqkv)};
  if (!has_flash_shape(plan) || std::any_of(more.begin(), more.end(), [](uintptr_t at) { return at % 16 != 0; })) {
    return std::nullopt;
  }
  return with_shapes<T>(plan.width, [&](auto shapes) {
    using All = decltype(shapes);
    const auto done = run_few(typename All::FewBackward(), plan.tokens, [&](auto shape) {
      return launch_backward_few<decltype(shape)>(plan, shared_bytes, stream);
    });
    return done ? done : launch_backward<typename All::Backward>(plan, shared_bytes, stream);
  });
}

}  // namespace jaxunet::cuda
