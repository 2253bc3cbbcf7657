// Weight gradient of the 3×3 convolution and of the linear layer as an implicit GEMM with a ring of
// stages (multistage_tile.cuh): 16-bit types, channels and features in multiples of 8, compute
// capability 8.0 and later.
//
// dW = Aᵀ · dy. Its rows are (tap, channel), followed by the projected channels, which give the
// gradient of a shortcut; K runs over the pixels of the block's split. A thread copies the same
// eight channels of one tap to every stage. So it only increments its addresses and the line and
// column of its pixel, without divisions. split_k_reduce adds the splits.
//
// Shared memory: the ring; both tiles of a stage are MN-major. Grid: (tiles of rows × tiles of
// features, features first; splits).

#include "common/dispatch_dtype.cuh"
#include "common/fast_divmod.h"
#include "conv3x3/channels.cuh"
#include "conv3x3/dispatch.h"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/multistage.h"
#include "conv3x3/portable/multistage_tile.cuh"

namespace jaxunet::cuda {
namespace {

struct Parameters {
  Channels x, projected;
  const void* dy;
  int pixels, features, feature_tiles;
  int share;  // pixels per split, a multiple of kDepth
  FastDivmod width, height;
  // Distance from one row that a thread copies to the next: lines of an image (modulo its height),
  // and pixels within a line.
  int lines, columns;
  float *partials, *shortcut_partials;
};

// Copies the tiles of A and dy, stage by stage. Pointers are in bytes.
template <class M>
struct WeightGradientCopies {
  using CopyA = TileCopy<M::kThreads, M::kDepth, M::kM / 8>;
  using CopyB = TileCopy<M::kThreads, M::kDepth, M::kN / 8>;
  const Parameters& p;
  CopyA copy_a;
  CopyB copy_b;
  int left;  // pixels from this stage's first to the end of the split
  // For A: the channels of the part, and the tap's offsets. `width` is 0 past the last row of dW.
  int width = 0, dy = 0, dx = 0;
  int x, y;  // of the next pixel that this thread copies
  bool feature_there;
  const char *a, *b;

  __device__ WeightGradientCopies(const Parameters& p_, int first_row, int first_feature,
                                  int first_pixel, int last_pixel)
      : p(p_), copy_a(threadIdx.x), copy_b(threadIdx.x), left(last_pixel - first_pixel) {
    const int pixel = first_pixel + copy_a.row, line = p.width.quotient(pixel);
    x = p.width.remainder(pixel, line);
    y = p.height.remainder(line, p.height.quotient(line));
    a = begin_of(first_row + 8 * copy_a.vector, pixel);
    const int feature = first_feature + 8 * copy_b.vector;
    feature_there = copy_b.active && feature < p.features;
    b = static_cast<const char*>(p.dy) +
        2 * (static_cast<int64_t>(first_pixel + copy_b.row) * p.features + feature);
  }

  // The address at a pixel of the eight columns of A that begin with row `row` of dW; sets width,
  // dy and dx.
  __device__ const char* begin_of(int row, int pixel) {
    const Channels* image = &p.x;
    if (row < 9 * p.x.total) {
      const int tap = row / p.x.total;
      row -= tap * p.x.total;
      dy = tap / 3 - 1;
      dx = tap % 3 - 1;
    } else {
      image = &p.projected;
      row -= 9 * p.x.total;
      if (row >= p.projected.total) return static_cast<const char*>(p.dy);
    }
    int part = 0;
#pragma unroll
    for (int i = 0; i < kMaxParts - 1; ++i) {
      if (part == i && i + 1 < image->count && row >= image->widths[i]) {
        row -= image->widths[i];
        ++part;
      }
    }
    width = image->widths[part];
    const int64_t at = pixel + dy * static_cast<int64_t>(p.width.divisor) + dx;
    return static_cast<const char*>(image->data[part]) + 2 * (at * width + row);
  }

  __device__ void operator()(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < CopyA::kPasses; ++i) {
      const bool valid = width > 0 && copy_a.row + i * CopyA::kRows < left &&
                         static_cast<uint32_t>(y + dy) < p.height.divisor &&
                         static_cast<uint32_t>(x + dx) < p.width.divisor;
      cp_async_16(stage + copy_a.place(i), valid ? a : p.dy, valid);
      a += static_cast<int64_t>(2 * CopyA::kRows) * width;
      next_pixel();
    }
    if (copy_b.active) {
#pragma unroll
      for (int i = 0; i < CopyB::kPasses; ++i) {
        const bool valid = feature_there && copy_b.row + i * CopyB::kRows < left;
        cp_async_16(stage + M::kLeftBytes + copy_b.place(i), valid ? b : p.dy, valid);
        b += static_cast<int64_t>(2 * CopyB::kRows) * p.features;
      }
    }
    left -= M::kDepth;
  }

  __device__ void next_pixel() {
    const int wide = static_cast<int>(p.width.divisor), high = static_cast<int>(p.height.divisor);
    x += p.columns;
    y += p.lines;
    if (x >= wide) {
      x -= wide;
      ++y;
    }
    if (y >= high) y -= high;
  }
};

template <class M>
__device__ void write_partials(const Parameters& p, const typename M::Accumulator& accumulator,
                               int first_row, int first_feature) {
  const int taps = 9 * p.x.total, projected = p.projected.total;
  const int64_t split = blockIdx.y;
  float* to = nullptr;
  each_row<M>(
      accumulator,
      [&](int row) {
        const int m = first_row + row;
        to = m < taps ? p.partials + (split * taps + m) * p.features
                      : p.shortcut_partials + (split * projected + m - taps) * p.features;
        return m < taps + projected;
      },
      [&](int column, float first, float second) {
        const int feature = first_feature + column;
        if (feature < p.features)
          *reinterpret_cast<AlignedArray<float, 2>*>(to + feature) = {{first, second}};
      });
}

template <class M, class T>
__global__ void __launch_bounds__(M::kThreads, M::kBlocks)
    multistage_weight_gradient_kernel(const __grid_constant__ Parameters p) {
  const int row_tile = blockIdx.x / p.feature_tiles,
            feature_tile = blockIdx.x - row_tile * p.feature_tiles;
  const int first_row = row_tile * M::kM, first_feature = feature_tile * M::kN;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * p.share;
  const int first = static_cast<int>(begin < p.pixels ? begin : p.pixels);
  const int last = p.pixels - first < p.share ? p.pixels : first + p.share;
  typename M::Accumulator accumulator{};
  WeightGradientCopies<M> copies(p, first_row, first_feature, first, last);
  multistage_mainloop<M, T, true, true>(accumulator, (last - first + M::kDepth - 1) / M::kDepth,
                                        copies);
  if (add_slices<M>(accumulator)) write_partials<M>(p, accumulator, first_row, first_feature);
}

template <class M, class T>
cudaError_t run(const Conv3x3WeightGradient& plan, int splits, float* partials,
                float* shortcut_partials, cudaStream_t stream) {
  Parameters p{};
  p.x = channels_of(plan.x);
  p.projected = channels_of(plan.projected);
  p.dy = plan.dy;
  p.pixels = static_cast<int>(plan.batch * plan.height * plan.width);
  p.features = static_cast<int>(plan.features);
  p.feature_tiles = (p.features + M::kN - 1) / M::kN;
  const int steps = (p.pixels + M::kDepth - 1) / M::kDepth;
  p.share = (steps + splits - 1) / splits * M::kDepth;
  p.width = FastDivmod(plan.width);
  p.height = FastDivmod(plan.height);
  constexpr int kRows = WeightGradientCopies<M>::CopyA::kRows;
  p.lines = static_cast<int>(kRows / plan.width % plan.height);
  p.columns = static_cast<int>(kRows % plan.width);
  p.partials = partials;
  p.shortcut_partials = shortcut_partials;
  const auto kernel = multistage_weight_gradient_kernel<M, T>;
  const cudaError_t error = allow_shared_memory(kernel, M::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int rows = 9 * p.x.total + p.projected.total;
  const dim3 grid((rows + M::kM - 1) / M::kM * p.feature_tiles, splits);
  return launch(kernel, grid, M::kThreads, M::kSharedBytes, stream, p);
}

template <class T>
cudaError_t run(const Conv3x3WeightGradient& plan, int tile, int splits, float* partials,
                float* shortcut_partials, cudaStream_t stream) {
  switch (tile) {
#define RUN(index, ...) \
  case index:           \
    return run<Multistage<__VA_ARGS__>, T>(plan, splits, partials, shortcut_partials, stream);
    MULTISTAGE_TILES(RUN)
#undef RUN
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t multistage_weight_gradient(const Conv3x3WeightGradient& plan, int tile, int splits,
                                       float* partials, float* shortcut_partials,
                                       cudaStream_t stream) {
  if (!takes_multistage(plan)) return cudaErrorInvalidValue;
  return plan.type == Type::kFloat16
             ? run<__half>(plan, tile, splits, partials, shortcut_partials, stream)
             : run<__nv_bfloat16>(plan, tile, splits, partials, shortcut_partials, stream);
}

}  // namespace jaxunet::cuda
