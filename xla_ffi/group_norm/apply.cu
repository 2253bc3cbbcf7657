// The activation from known coefficients: one read, one write.
#include "../by_type.cuh"
#include "block.cuh"
#include "kernels.h"

namespace jaxunet::cuda {
namespace {

struct Apply {
  Slab slab;
  Sources x;
  Rows a, b;
  bool silu;
  void* y;
};

constexpr int kThreads = 256;
constexpr int kReads = 4;  // vectors of a thread, on their way together

template <class T, int V>
__global__ void __launch_bounds__(kThreads) group_norm_apply(const __grid_constant__ Apply f) {
  const Place place(f.slab, V);
  if (place.steps == 0) return;
  const Stream<T, V> x(f.slab, place, f.x), y(f.slab, place, f.y);
  Vector<T, V> read[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    if (i < place.steps) read[i] = *x.at(i);
  }
  float a[V], b[V];
  load_floats(of_sample(f.a) + place.channel, a);
  load_floats(of_sample(f.b) + place.channel, b);
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    if (i >= place.steps) break;
    float value[V];
    read[i].get(value);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = value[j] * a[j] + b[j];
      value[j] = f.silu ? z * sigmoid<T>(z) : z;
    }
    read[i].set(value);
    *y.at(i) = read[i];
  }
}

template <class T>
cudaError_t launch_apply(const NormApply& plan, cudaStream_t stream) {
  if (plan.batch == 0 || plan.pixels == 0 || plan.x.total == 0) return cudaSuccess;
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = whole_vectors(plan.x, kVector);
  const int64_t of_pixel = plan.x.total / (vectors ? kVector : 1);
  Apply f{{}, sources(plan.x), plan.a, plan.b, plan.silu, plan.y};
  Slab& slab = f.slab;
  slab.pixels = static_cast<int>(plan.pixels);
  slab.channels = static_cast<int>(plan.x.total);
  slab.vectors = static_cast<int>(std::min<int64_t>(of_pixel, 8));  // a line
  slab.lane_bits = bits_of(slab.vectors);
  slab.tiles = 1;
  slab.row_bits = bits_of(kThreads) - slab.lane_bits;
  slab.share = kReads << slab.row_bits;
  const dim3 grid(static_cast<unsigned>(ceil_of(plan.pixels, slab.share)),
                  static_cast<unsigned>(ceil_of(of_pixel, slab.vectors)), static_cast<unsigned>(plan.batch));
  return launch_plainly(vectors ? group_norm_apply<T, kVector> : group_norm_apply<T, 1>, grid, kThreads, stream, f);
}

}  // namespace

cudaError_t norm_apply(const NormApply& plan, cudaStream_t stream) {
  return by_type(plan.type, [&](auto nought) { return launch_apply<decltype(nought)>(plan, stream); });
}

}  // namespace jaxunet::cuda
