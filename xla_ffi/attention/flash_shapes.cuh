// The tiles of the flash kernels for each type and width of heads, and the dispatch to them.
#pragma once

#include <cstdint>
#include <optional>

#include "flash.h"
#include "flash_backward.cuh"
#include "flash_forward.cuh"

namespace jaxunet::cuda {

// Shapes of kernels for few tokens, ordered from fewest rows to most. One block has all rows of a
// head; in the backward pass, this block computes all gradients.
template <class... Shape>
struct Few {};

// Shapes of kernels for any number of tokens, ordered from the fastest to the one that needs the
// least shared memory.
template <class... Shape>
struct Any {};

// For widths that hardly any network has: no kernels for few tokens.
struct NoFew {
  using FewForward = Few<>;
  using FewBackward = Few<>;
};

// The kernels for heads padded to kWidth channels. The template arguments after the type are:
// - ForwardShape: kWidth, kWarpTiles (16-row tiles per warp), kRowWarps, kKeySplits, kTileKeys,
//   kBlocksPerSm, kColumnWarps (1 if left out);
// - BackwardShape: kWidth, kWarpTiles, kRowWarps, kColumnWarps, kStreamRows, kBlocksPerSm.
// The 16-bit shapes that configs/elephants64.py and configs/cifar10.py use are the fastest on an
// H200, by the geometric mean of the times at batch 32 and 256. This does not hold for the later
// shapes of an Any, which need less shared memory. To refit them, change a shape and run `python -m
// jaxunet.benchmark.kernels` on the cases of attention.
template <class T, int kWidth>
struct Shapes;

template <class T>
struct Shapes<T, 32> {
  using Forward = ForwardShape<T, 32, 2, 4, 1, 64, 3>;
  using FewForward = Few<ForwardShape<T, 32, 1, 4, 1, 64, 4>>;
  using Backward = Any<BackwardShape<T, 32, 2, 4, 1, 32, 2>>;
  using FewBackward =
      Few<BackwardShape<T, 32, 1, 4, 1, 32, 4>, BackwardShape<T, 32, 2, 8, 1, 64, 1>>;
};
template <class T>
struct Shapes<T, 64> : NoFew {
  using Forward = ForwardShape<T, 64, 2, 4, 1, 32, 2>;
  using Backward = Any<BackwardShape<T, 64, 1, 4, 1, 32, 3>>;
};
template <class T>
struct Shapes<T, 128> : NoFew {
  using Forward = ForwardShape<T, 128, 2, 4, 1, 32, 2>;
  using Backward = Any<BackwardShape<T, 128, 1, 8, 1, 32, 1>>;
};
template <class T>
struct Shapes<T, 256> {
  using Forward = ForwardShape<T, 256, 1, 4, 1, 32, 2>;
  using FewForward = Few<ForwardShape<T, 256, 1, 1, 1, 16, 1, 4>>;
  // The second, with 72 KiB, fits in the 99 KiB per block of compute capability 8.6 and 8.9.
  using Backward =
      Any<BackwardShape<T, 256, 2, 2, 4, 64, 1>, BackwardShape<T, 256, 1, 2, 2, 32, 1>>;
  using FewBackward = Few<BackwardShape<T, 256, 1, 1, 4, 16, 1>>;
};

template <>
struct Shapes<float, 32> : NoFew {
  using Forward = ForwardShape<float, 32, 1, 4, 1, 32, 2>;
  using Backward = Any<BackwardShape<float, 32, 1, 4, 1, 32, 2>>;
};
template <>
struct Shapes<float, 64> : NoFew {
  using Forward = ForwardShape<float, 64, 1, 4, 1, 32, 2>;
  using Backward = Any<BackwardShape<float, 64, 1, 4, 1, 32, 2>>;
};
template <>
struct Shapes<float, 128> : NoFew {
  using Forward = ForwardShape<float, 128, 1, 4, 1, 32, 2>;
  using Backward = Any<BackwardShape<float, 128, 1, 4, 2, 32, 1>>;
};
template <>
struct Shapes<float, 256> : NoFew {
  using Forward = ForwardShape<float, 256, 1, 4, 2, 32, 1>;
  using Backward = Any<BackwardShape<float, 256, 1, 2, 4, 64, 1>>;
};

// Calls visit with the Shapes of the width.
template <class T, class Visit>
auto dispatch_width(int64_t width, Visit visit) {
  if (width <= 32) return visit(Shapes<T, 32>());
  if (width <= 64) return visit(Shapes<T, 64>());
  if (width <= 128) return visit(Shapes<T, 128>());
  return visit(Shapes<T, 256>());
}

// True if the flash kernels accept this plan: heads of at most 256 channels, a multiple of 8, so
// that rows are aligned to 16 bytes, as the arrays are (kAlignment in binding/reader.h); and
// offsets within a sample that fit in 32 bits.
template <class Plan>
bool flash_takes(const Plan& plan) {
  return plan.width % 8 == 0 && plan.width <= 256 &&
         3 * plan.tokens * plan.heads * plan.width <= INT32_MAX;
}

// Both overloads call run(shape) for one shape after another, until one fits in the device's shared
// memory and, if the shape is for few tokens, has enough rows. They return nothing if none does.
template <class... Shape, class Run>
std::optional<cudaError_t> run_first_fit(Any<Shape...>, Run run) {
  std::optional<cudaError_t> done;
  static_cast<void>((... || (done = run(Shape()))));
  return done;
}

template <class... Shape, class Run>
std::optional<cudaError_t> run_first_fit(Few<Shape...>, int64_t tokens, Run run) {
  std::optional<cudaError_t> done;
  static_cast<void>((... || (tokens <= Shape::kRows && (done = run(Shape())))));
  return done;
}

// Launch the kernels for the plan; return nothing if none accepts it.
template <class T>
std::optional<cudaError_t> dispatch_forward(const AttentionForward& plan, int shared_bytes,
                                            cudaStream_t stream) {
  if (!flash_takes(plan)) return std::nullopt;
  return dispatch_width<T>(plan.width, [&](auto shapes) {
    using All = decltype(shapes);
    const auto run = [&](auto shape) {
      return launch_forward<decltype(shape)>(plan, shared_bytes, stream);
    };
    const auto done = run_first_fit(typename All::FewForward(), plan.tokens, run);
    return done ? done : run(typename All::Forward());
  });
}

template <class T>
std::optional<cudaError_t> dispatch_backward(const AttentionBackward& plan, int shared_bytes,
                                             cudaStream_t stream) {
  if (!flash_takes(plan)) return std::nullopt;
  return dispatch_width<T>(plan.width, [&](auto shapes) {
    using All = decltype(shapes);
    const auto done = run_first_fit(typename All::FewBackward(), plan.tokens, [&](auto shape) {
      return launch_backward_few<decltype(shape)>(plan, shared_bytes, stream);
    });
    if (done) return done;
    return run_first_fit(typename All::Backward(), [&](auto shape) {
      return launch_backward<decltype(shape)>(plan, shared_bytes, stream);
    });
  });
}

}  // namespace jaxunet::cuda
