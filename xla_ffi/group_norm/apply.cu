// y = act(a * x + b) from coefficients that are known already: one read, one write.
//
// A thread takes one vector of channels of kSteps pixels and issues all of its loads before it
// computes. A block has 256 threads, up to 8 vectors (a line of 128 bytes) side by side along the
// channels, the rest along the pixels. Grid: (shares of the pixels, lines of channels, batch).
// Nothing stays in shared memory: of SmemResidentTiling this kernel uses only the map from threads
// to channels and pixels.
#include "common/dispatch_dtype.cuh"
#include "kernels.h"
#include "launch.h"
#include "smem_resident.cuh"

namespace jaxunet::cuda {
namespace {

struct Apply {
  SmemResidentTiling tiling;
  TensorParts x;
  Rows a, b;
  bool silu;
  void* y;
};

constexpr int kThreads = 256;
constexpr int kSteps = 4;        // of a thread: loads on their way together
constexpr int kLineVectors = 8;  // vectors of 16 bytes in a line of memory

template <class T, int V>
__global__ void __launch_bounds__(kThreads) group_norm_apply(const __grid_constant__ Apply f) {
  const ThreadTile tile(f.tiling, V);
  if (tile.steps == 0) return;
  const ThreadVectors<T, V> x(f.tiling, tile, f.x), y(f.tiling, tile, f.y);
  Vector<T, V> loaded[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i < tile.steps) loaded[i] = *x.at(i);
  }
  float a[V], b[V];
  load_floats(sample_row(f.a) + tile.channel, a);
  load_floats(sample_row(f.b) + tile.channel, b);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i >= tile.steps) break;
    float value[V];
    loaded[i].to_floats(value);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = value[j] * a[j] + b[j];
      value[j] = f.silu ? z * sigmoid<T>(z) : z;
    }
    loaded[i].from_floats(value);
    *y.at(i) = loaded[i];
  }
}

template <class T>
cudaError_t launch_apply(const NormApply& plan, cudaStream_t stream) {
  if (plan.batch == 0 || plan.pixels == 0 || plan.x.total == 0) return cudaSuccess;
  constexpr int kVector = 16 / sizeof(T);
  const int vector = vector_of(plan.x, plan.type);
  const int64_t pixel_vectors = plan.x.total / vector;
  Apply f{{}, tensor_parts(plan.x), plan.a, plan.b, plan.silu, plan.y};
  SmemResidentTiling& tiling = f.tiling;
  tiling.pixels = static_cast<int>(plan.pixels);
  tiling.channels = static_cast<int>(plan.x.total);
  tiling.vectors = static_cast<int>(std::min<int64_t>(pixel_vectors, kLineVectors));
  tiling.lane_bits = ceil_log2(tiling.vectors);
  tiling.warp_columns = 1;
  tiling.row_bits = ceil_log2(kThreads) - tiling.lane_bits;
  tiling.block_pixels = kSteps << tiling.row_bits;
  const dim3 grid(static_cast<unsigned>(ceil_div(plan.pixels, tiling.block_pixels)),
                  static_cast<unsigned>(ceil_div(pixel_vectors, tiling.vectors)),
                  static_cast<unsigned>(plan.batch));
  return launch_static(vector > 1 ? group_norm_apply<T, kVector> : group_norm_apply<T, 1>, grid,
                       kThreads, stream, f);
}

}  // namespace

cudaError_t norm_apply(const NormApply& plan, cudaStream_t stream) {
  return dispatch_dtype(
      plan.type, [&](auto element) { return launch_apply<decltype(element)>(plan, stream); });
}

}  // namespace jaxunet::cuda
