// Forward and input gradient of the 3×3 convolution on every GPU of compute capability 8.0 and later, for every shape
// and type.
//
// A block computes 64 pixels × 64 features: four warps of 32 × 32. It walks over the columns of the left matrix (see
// gather.cuh) 32 at a time. While the tensor cores multiply one pair of tiles, the next is on its way from device
// memory to registers, where GroupNorm and SiLU are applied; it is then stored in the other half of shared memory.

#include "common/dispatch_dtype.cuh"
#include "conv3x3/portable/implicit_gemm.cuh"
#include "conv3x3/kernels.h"
#include "common/launch.cuh"
#include "common/warp_tile.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLoads = kTile * kDepth / 8 / kThreads;  // eights of a tile that a thread loads

struct Forward {
  Left left;
  Right right;
  Channels residual;  // added as it is; count = 0 where there is none
  Rows shift;
  void* y;
};

template <class T, bool kFlipped>
__global__ void __launch_bounds__(kThreads) portable_forward_kernel(const Forward plan) {
  alignas(16) __shared__ T left[2][kTileEntries<T>], right[2][kTileEntries<T>];
  const int thread = threadIdx.x, warp = thread / 32, row = warp / 2 * 32, column = warp % 2 * 32;
  const int first_pixel = blockIdx.x * kTile, first_feature = blockIdx.y * kTile;
  Sums sums{};
  Eight<T> next_left[kLoads], next_right[kLoads];

  const auto load = [&](int k) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads;
      plan.left.load(first_pixel + n / 4, k + n % 4 * 8, next_left[i]);
      if constexpr (kFlipped) {
        plan.right.load_columns(k + n % 4 * 8, first_feature + n / 4, next_right[i]);
      } else {
        plan.right.load_features(k + n / 8, first_feature + n % 8 * 8, next_right[i]);
      }
    }
  };
  const auto store = [&](int half) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads, along = n / 4 * kStride<T, false> + n % 4 * 8;
      next_left[i].store(left[half] + along);
      next_right[i].store(right[half] + (kFlipped ? along : n / 8 * kStride<T, true> + n % 8 * 8));
    }
  };

  load(0);
  for (int k = 0, half = 0; k < plan.left.columns; k += kDepth, half ^= 1) {
    store(half);
    __syncthreads();  // one is enough: whoever stores in this half again has passed the next one, after everybody's
                      // products
    if (k + kDepth < plan.left.columns) load(k + kDepth);
    multiply_tiles<false, !kFlipped>(sums, left[half], right[half], row, column);
  }

  const int features = plan.right.features;
  auto* y = static_cast<T*>(plan.y);
  each_pair(sums, first_pixel + row, first_feature + column, [&](int index, int feature, float sum, float next) {
    if (index >= plan.left.pixels) return;
    const int sample = index / (plan.left.height * plan.left.width);
    const float* shift = plan.shift.data + sample * plan.shift.stride;
    const float pair[2] = {sum, next};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (feature + i >= features) continue;
      float value = pair[i] + (plan.shift.data ? shift[feature + i] : 0.0f);
      if (plan.residual.count) value += wide(*plan.residual.at<T>(index, feature + i));
      y[static_cast<int64_t>(index) * features + feature + i] = narrow<T>(value);
    }
  });
}

template <class T>
cudaError_t forward(const Forward& plan, cudaStream_t stream) {
  const dim3 grid((plan.left.pixels + kTile - 1) / kTile, (plan.right.features + kTile - 1) / kTile);
  const auto kernel = plan.right.flipped ? portable_forward_kernel<T, true> : portable_forward_kernel<T, false>;
  return launch(kernel, grid, kThreads, 0, stream, plan);
}

}  // namespace

cudaError_t portable_forward(const Conv3x3& plan, cudaStream_t stream) {
  Forward all{left_of(plan, plan.projected), {}, channels_of(plan.residual), plan.shift, plan.y.data[0]};
  const int channels = static_cast<int>(plan.x.total), features = static_cast<int>(plan.features);
  all.right = {plan.kernel,
               plan.shortcut,
               channels,
               features,
               all.left.columns,
               plan.flipped,
               plan.flipped ? all.left.vectors : features % 8 == 0};
  if (all.left.pixels == 0 || features == 0) return cudaSuccess;
  return dispatch_dtype(plan.type, [&](auto nought) { return forward<decltype(nought)>(all, stream); });
}

}  // namespace jaxunet::cuda
