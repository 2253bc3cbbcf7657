// Forward 3×3 convolution, its input gradient and the linear layer as an implicit GEMM
// (implicit_gemm.cuh): every shape and type, compute capability 8.0 and later.
//
// A block computes a tile of 64 pixels × 64 features, 32 × 32 for each of its four warps. K runs
// over the columns of A, 32 per step of the mainloop. While the tensor cores multiply one stage of
// shared memory, the next tiles of A and B are loaded into registers, where the activation is
// applied, and are then stored to the other stage.
//
// Shared memory: two stages of a tile of A, K-major, and one of B, MN-major (features are
// contiguous; K-major if flipped). common/warp_tile.cuh has the layouts. Grid: (tiles of pixels,
// tiles of features).

#include "common/dispatch_dtype.cuh"
#include "common/launch.cuh"
#include "common/warp_tile.cuh"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/implicit_gemm.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLoads = kTile * kDepth / 8 / kThreads;  // of eight numbers, per thread and tile

// The kernel's only parameter.
struct Parameters {
  MatrixA a;
  MatrixB b;
  Channels residual;  // count = 0: none
  Rows shift;
  void* y;
};

template <class T, bool kFlipped>
__global__ void __launch_bounds__(kThreads) implicit_gemm_forward_kernel(const Parameters p) {
  alignas(16) __shared__ T a[2][kTileEntries<T>], b[2][kTileEntries<T>];
  const int thread = threadIdx.x, warp = thread / 32, row = warp / 2 * 32, column = warp % 2 * 32;
  const int first_pixel = blockIdx.x * kTile, first_feature = blockIdx.y * kTile;
  Accumulator accumulator{};
  Eight<T> next_a[kLoads], next_b[kLoads];

  const auto load = [&](int k) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads;
      p.a.load<true>(first_pixel + n / 4, k + n % 4 * 8, next_a[i]);
      if constexpr (kFlipped) {
        p.b.load_columns(k + n % 4 * 8, first_feature + n / 4, next_b[i]);
      } else {
        p.b.load_features(k + n / 8, first_feature + n % 8 * 8, next_b[i]);
      }
    }
  };
  const auto store = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads, k_major = n / 4 * kStride<T, false> + n % 4 * 8;
      next_a[i].store(a[stage] + k_major);
      next_b[i].store(b[stage] + (kFlipped ? k_major : n / 8 * kStride<T, true> + n % 8 * 8));
    }
  };

  load(0);
  for (int k = 0, stage = 0; k < p.a.columns; k += kDepth, stage ^= 1) {
    store(stage);
    // One barrier per step is enough: a thread stores to this stage again only after the next
    // barrier, which all threads reach after they have multiplied this stage.
    __syncthreads();
    if (k + kDepth < p.a.columns) load(k + kDepth);
    multiply_tiles<false, !kFlipped>(accumulator, a[stage], b[stage], row, column);
  }

  const int features = p.b.features;
  auto* y = static_cast<T*>(p.y);
  each_pair(accumulator, first_pixel + row, first_feature + column,
            [&](int index, int feature, float sum, float next) {
              if (index >= p.a.pixels) return;
              const int sample = index / (p.a.height * p.a.width);
              const float* shift = p.shift.data + sample * p.shift.stride;
              const float pair[2] = {sum, next};
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                if (feature + i >= features) continue;
                float value = pair[i] + (p.shift.data ? shift[feature + i] : 0.0f);
                if (p.residual.count) value += wide(*p.residual.at<T>(index, feature + i));
                y[static_cast<int64_t>(index) * features + feature + i] = narrow<T>(value);
              }
            });
}

template <class T>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  const dim3 grid((p.a.pixels + kTile - 1) / kTile, (p.b.features + kTile - 1) / kTile);
  const auto kernel =
      p.b.flipped ? implicit_gemm_forward_kernel<T, true> : implicit_gemm_forward_kernel<T, false>;
  return launch(kernel, grid, kThreads, 0, stream, p);
}

}  // namespace

cudaError_t implicit_gemm_forward(const Conv3x3& plan, cudaStream_t stream) {
  Parameters p{matrix_a(plan), {}, channels_of(plan.residual), plan.shift, plan.y.data[0]};
  p.a.a = plan.a;
  p.a.b = plan.b;
  const int channels = static_cast<int>(plan.x.total), features = static_cast<int>(plan.features);
  p.b = {plan.kernel,
         plan.shortcut,
         channels,
         features,
         p.a.columns,
         plan.flipped,
         plan.flipped ? p.a.vectors : features % 8 == 0};
  if (p.a.pixels == 0 || features == 0) return cudaSuccess;
  return dispatch_dtype(plan.type, [&](auto zero) { return run<decltype(zero)>(p, stream); });
}

}  // namespace jaxunet::cuda
