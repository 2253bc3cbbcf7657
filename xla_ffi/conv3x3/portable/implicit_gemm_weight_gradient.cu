// Weight gradient of the 3×3 convolution on every GPU of compute capability 8.0 and later, for every shape and type.
//
// It is the transposed left matrix (see gather.cuh) times dy, the columns that a shortcut projects with those of x: a
// block computes 64 (tap, channel) rows × 64 features over a share of the pixels, 32 at a time, in the way of
// portable_forward.cu. The shares are added afterwards, in order.

#include "common/dispatch_dtype.cuh"
#include "conv3x3/portable/implicit_gemm.cuh"
#include "conv3x3/kernels.h"
#include "common/launch.cuh"
#include "common/warp_tile.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLoads = kTile * kDepth / 8 / kThreads;

struct WeightGradient {
  Left left;
  const void* dy;
  int features, share;  // pixels of a block, a multiple of kDepth
  bool vectors;
  float *sums, *of_shortcut;
};

template <class T>
__global__ void __launch_bounds__(kThreads) portable_weight_gradient_kernel(const WeightGradient plan) {
  alignas(16) __shared__ T left[2][kTileEntries<T>], right[2][kTileEntries<T>];
  const int thread = threadIdx.x, warp = thread / 32, row = warp / 2 * 32, column = warp % 2 * 32;
  const int first_row = blockIdx.x * kTile, first_feature = blockIdx.y * kTile;
  const int64_t begin = static_cast<int64_t>(blockIdx.z) * plan.share;
  const int first = static_cast<int>(begin < plan.left.pixels ? begin : plan.left.pixels);
  const int last = plan.left.pixels - first < plan.share ? plan.left.pixels : first + plan.share;
  Sums sums{};
  Eight<T> next_left[kLoads], next_right[kLoads];

  const auto load_dy = [&](int pixel, int feature, Eight<T>& out) {
    out.clear();
    const T* from = static_cast<const T*>(plan.dy) + static_cast<int64_t>(pixel) * plan.features + feature;
    if (pixel >= plan.left.pixels || feature >= plan.features) return;
    if (plan.vectors) {
      out.load(from);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (feature + i < plan.features) out.at[i] = from[i];
    }
  };
  const auto load = [&](int pixel) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads;
      plan.left.load(pixel + n / 8, first_row + n % 8 * 8, next_left[i]);
      load_dy(pixel + n / 8, first_feature + n % 8 * 8, next_right[i]);
    }
  };
  const auto store = [&](int half) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads, across = n / 8 * kStride<T, true> + n % 8 * 8;
      next_left[i].store(left[half] + across);
      next_right[i].store(right[half] + across);
    }
  };

  if (first < last) load(first);
  for (int pixel = first, half = 0; pixel < last; pixel += kDepth, half ^= 1) {
    store(half);
    __syncthreads();
    if (pixel + kDepth < last) load(pixel + kDepth);
    multiply_tiles<true, true>(sums, left[half], right[half], row, column);
  }

  const int extra = plan.left.extra.total, taps = plan.left.columns - extra;
  float* to = plan.sums + static_cast<int64_t>(blockIdx.z) * taps * plan.features;
  float* below = plan.of_shortcut + (static_cast<int64_t>(blockIdx.z) * extra - taps) * plan.features;
  each_pair(sums, first_row + row, first_feature + column, [&](int m, int feature, float sum, float next) {
    if (m >= plan.left.columns) return;
    float* entry = (m < taps ? to : below) + static_cast<int64_t>(m) * plan.features + feature;
    if (feature < plan.features) entry[0] = sum;
    if (feature + 1 < plan.features) entry[1] = next;
  });
}

}  // namespace

cudaError_t portable_weight_gradient(const Conv3x3WeightGradient& plan, int splits, float* sums, float* of_shortcut,
                                     cudaStream_t stream) {
  const Left left = left_of(plan, plan.projected);
  const int features = static_cast<int>(plan.features), steps = (left.pixels + kDepth - 1) / kDepth;
  const int share = (steps + splits - 1) / splits * kDepth;
  const WeightGradient all{left, plan.dy, features, share, features % 8 == 0, sums, of_shortcut};
  const dim3 grid((left.columns + kTile - 1) / kTile, (features + kTile - 1) / kTile, splits);
  return dispatch_dtype(plan.type, [&](auto nought) {
    return launch(portable_weight_gradient_kernel<decltype(nought)>, grid, kThreads, 0, stream, all);
  });
}

}  // namespace jaxunet::cuda
