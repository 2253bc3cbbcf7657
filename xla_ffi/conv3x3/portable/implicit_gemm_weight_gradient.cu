// Weight gradient of the 3×3 convolution and of the linear layer as an implicit GEMM
// (implicit_gemm.cuh): every shape and type, compute capability 8.0 and later.
//
// dW = Aᵀ · dy. Its rows are (tap, channel), followed by the projected channels, which give the
// gradient of a shortcut. A block computes a tile of 64 rows × 64 features over the pixels of its
// split (K), 32 at a time, as implicit_gemm_forward.cu does; both operands are MN-major.
// split_k_reduce adds the splits. Grid: (tiles of rows, tiles of features, splits).

#include "common/dispatch_dtype.cuh"
#include "common/launch.cuh"
#include "common/warp_tile.cuh"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/implicit_gemm.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLoads = kTile * kDepth / 8 / kThreads;

struct Parameters {
  MatrixA a;
  const void* dy;
  int features;
  int share;     // pixels per split, a multiple of kDepth
  bool vectors;  // eight features of dy are contiguous in memory
  float *partials, *shortcut_partials;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    implicit_gemm_weight_gradient_kernel(const Parameters p) {
  alignas(16) __shared__ T a[2][kTileEntries<T>], b[2][kTileEntries<T>];
  const int thread = threadIdx.x, warp = thread / 32, row = warp / 2 * 32, column = warp % 2 * 32;
  const int first_row = blockIdx.x * kTile, first_feature = blockIdx.y * kTile;
  const int64_t begin = static_cast<int64_t>(blockIdx.z) * p.share;
  const int first = static_cast<int>(begin < p.a.pixels ? begin : p.a.pixels);
  const int last = p.a.pixels - first < p.share ? p.a.pixels : first + p.share;
  Accumulator accumulator{};
  Eight<T> next_a[kLoads], next_b[kLoads];

  const auto load_dy = [&](int pixel, int feature, Eight<T>& out) {
    out.clear();
    const T* from =
        static_cast<const T*>(p.dy) + static_cast<int64_t>(pixel) * p.features + feature;
    if (pixel >= p.a.pixels || feature >= p.features) return;
    if (p.vectors) {
      out.load(from);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (feature + i < p.features) out.at[i] = from[i];
    }
  };
  const auto load = [&](int pixel) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads;
      p.a.load<false>(pixel + n / 8, first_row + n % 8 * 8, next_a[i]);
      load_dy(pixel + n / 8, first_feature + n % 8 * 8, next_b[i]);
    }
  };
  const auto store = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = thread + i * kThreads, at = n / 8 * kStride<T, true> + n % 8 * 8;
      next_a[i].store(a[stage] + at);
      next_b[i].store(b[stage] + at);
    }
  };

  if (first < last) load(first);
  for (int pixel = first, stage = 0; pixel < last; pixel += kDepth, stage ^= 1) {
    store(stage);
    __syncthreads();  // one per step is enough, as in implicit_gemm_forward.cu
    if (pixel + kDepth < last) load(pixel + kDepth);
    multiply_tiles<true, true>(accumulator, a[stage], b[stage], row, column);
  }

  // Row m goes to row m of the kernel's gradient, or to row m - taps of the shortcut's gradient;
  // `below` points `taps` rows before the latter so that it can be indexed by m.
  const int projected = p.a.projected.total, taps = p.a.columns - projected;
  float* to = p.partials + static_cast<int64_t>(blockIdx.z) * taps * p.features;
  float* below =
      p.shortcut_partials + (static_cast<int64_t>(blockIdx.z) * projected - taps) * p.features;
  each_pair(accumulator, first_row + row, first_feature + column,
            [&](int m, int feature, float sum, float next) {
              if (m >= p.a.columns) return;
              float* entry =
                  (m < taps ? to : below) + static_cast<int64_t>(m) * p.features + feature;
              if (feature < p.features) entry[0] = sum;
              if (feature + 1 < p.features) entry[1] = next;
            });
}

}  // namespace

cudaError_t implicit_gemm_weight_gradient(const Conv3x3WeightGradient& plan, int splits,
                                          float* partials, float* shortcut_partials,
                                          cudaStream_t stream) {
  const MatrixA a = matrix_a(plan);
  const int features = static_cast<int>(plan.features), steps = (a.pixels + kDepth - 1) / kDepth;
  const int share = (steps + splits - 1) / splits * kDepth;
  const Parameters p{a, plan.dy, features, share, features % 8 == 0, partials, shortcut_partials};
  const dim3 grid((a.columns + kTile - 1) / kTile, (features + kTile - 1) / kTile, splits);
  return dispatch_dtype(plan.type, [&](auto zero) {
    return launch(implicit_gemm_weight_gradient_kernel<decltype(zero)>, grid, kThreads, 0, stream,
                  p);
  });
}

}  // namespace jaxunet::cuda
