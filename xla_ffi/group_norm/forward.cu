// GroupNorm forward: the statistics alone, or with the activation in the same launch. Large images flow instead.
#include "../by_type.cuh"
#include "flow.cuh"
#include "flows.h"
#include "kernels.h"
#include "statistics.cuh"

namespace jaxunet::cuda {
namespace {

struct Forward {
  Slab slab;
  Sources x;
  Rows scale, offset;
  float eps;
  bool silu;
  void* y;  // null: statistics only
  Results to;
};

constexpr Need kNeed{1, 512, sizeof(float4), sizeof(float4) + 5 * sizeof(float)};

// Mean and deviations of the thread's pixels, by channel, chunk by chunk: first a chunk's mean, then its deviations.
template <class T, int V>
__device__ void accumulate(const Slab& slab, const Place& place, const Stream<T, V>& x, const Ring<T, V>& ring,
                           const float (&pivot)[V], float (&mean)[V], float (&deviation)[V]) {
  float seen = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < slab.chunks; ++chunk) {
    wait_group<kRing - 1>();
    const int count = min(place.steps - chunk * slab.depth, slab.depth);
    if (count > 0) {
      const auto fresh = static_cast<float>(count);
      float middle[V] = {}, squares[V] = {};
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        float value[V];
        ring.slot(chunk, i)->get(value);
#pragma unroll
        for (int j = 0; j < V; ++j) middle[j] += kPivot<T> ? value[j] - pivot[j] : value[j];
      }
      const float share = 1.0f / fresh;
#pragma unroll
      for (int j = 0; j < V; ++j) middle[j] *= share;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float value[V];
        ring.slot(chunk, i)->get(value);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float away = (kPivot<T> ? value[j] - pivot[j] : value[j]) - middle[j];
          squares[j] += away * away;
        }
      }
      const float weight = fresh / (seen + fresh), both = seen * weight;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float away = middle[j] - mean[j];
        mean[j] += away * weight;
        deviation[j] += squares[j] + away * away * both;
      }
      seen += fresh;
    }
    ring.fetch(x, chunk + kRing, place.steps);
    end_group();
  }
}

// From channels of a thread to pieces of a warp, into the warp's row of `partial`.
template <int V>
__device__ void join_warp(const Slab& slab, const Place& place, int own, float (&mean)[V], float (&deviation)[V],
                          float4* partial) {
  const auto count = static_cast<float>(place.steps);
  join_neighbours(slab.piece_bits, count, mean, deviation);
  const auto first = [&](int j) { return (j & ((1 << slab.piece_bits) - 1)) == 0; };
  const auto size = static_cast<float>(1 << slab.piece_bits);
  float total = count, middle[V];
#pragma unroll
  for (int j = 0; j < V; ++j) middle[j] = count * mean[j];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step < 1 << slab.lane_bits) break;
    total += __shfl_xor_sync(~0u, total, step);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (first(j)) middle[j] += __shfl_xor_sync(~0u, middle[j], step);
    }
  }
  const float share = total > 0 ? 1.0f / total : 0.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    middle[j] *= share;
    const float away = mean[j] - middle[j];
    deviation[j] += size * count * away * away;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step < 1 << slab.lane_bits) break;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (first(j)) deviation[j] += __shfl_xor_sync(~0u, deviation[j], step);
    }
  }
  float4* const row = partial + place.warp_row * (own >> slab.piece_bits);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (first(j) && place.alone) {
      row[(place.local + j) >> slab.piece_bits] = make_float4(size * total, middle[j], deviation[j], 0);
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(512, 2) group_norm_forward(const __grid_constant__ Forward f) {
  const Slab& slab = f.slab;
  const int own = slab.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const Place place(slab, V);
  const Stream<T, V> x(slab, place, f.x);
  const Ring<T, V> ring{reinterpret_cast<Vector<T, V>*>(shared_memory()), slab.depth};
#pragma unroll 1
  for (int chunk = 0; chunk < kRing; ++chunk) {
    ring.fetch(x, chunk, place.steps);
    end_group();
  }
  // Meanwhile:
  const Cut cut{own, slab.group, slab.piece_bits, static_cast<int>(blockDim.x) / 32 / slab.tiles, slab.ranks};
  const Scratch scratch(cut, shared_memory() + slab.held);
  const int there = min(own, slab.channels - first), threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    scratch.scale[c] = of_sample(f.scale)[first + c];
    scratch.offset[c] = of_sample(f.offset)[first + c];
    if constexpr (kPivot<T>) {
      int width;
      scratch.pivot[c] = wide(*column<T>(f.x, first + c / slab.group * slab.group, blockIdx.z, slab.pixels, &width));
    }
  }
  {
    float pivot[V] = {}, mean[V] = {}, deviation[V] = {};
    if constexpr (kPivot<T>) {
      __syncthreads();
      if (place.steps > 0) load_floats(scratch.pivot + place.local, pivot);
    }
    accumulate(slab, place, x, ring, pivot, mean, deviation);
    join_warp(slab, place, own, mean, deviation, scratch.partial);
  }
  __syncthreads();
  join_groups(cut, f.eps, scratch);
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    const auto [mean, inverse, a, b] =
        finish(f.to, scratch, cut, kPivot<T>, c, static_cast<int64_t>(blockIdx.z) * slab.channels + first + c);
    scratch.scale[c] = a;
    if constexpr (kPivot<T>) {
      scratch.pivot[c] = mean;
    } else {
      scratch.offset[c] = b;
    }
  }
  if (f.y) {
    __syncthreads();
    float pivot[V] = {}, scale[V] = {}, offset[V] = {};
    if (place.steps > 0) {
      load_floats(scratch.scale + place.local, scale);
      load_floats(scratch.offset + place.local, offset);
      if constexpr (kPivot<T>) load_floats(scratch.pivot + place.local, pivot);
    }
    const Stream<T, V> y(slab, place, f.y);
    // What was read last is still there; what has gone comes once more.
#pragma unroll 1
    for (int chunk = slab.chunks - 1; chunk >= 0; --chunk) {
      wait_group<kRing - 1>();
      const int start = chunk * slab.depth, count = min(place.steps - start, slab.depth);
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        float value[V];
        ring.slot(chunk, i)->get(value);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float z = (kPivot<T> ? value[j] - pivot[j] : value[j]) * scale[j] + offset[j];
          value[j] = f.silu ? z * sigmoid<T>(z) : z;
        }
        Vector<T, V> out;
        out.set(value);
        *y.at(start + i) = out;
      }
      if (chunk >= kRing) ring.fetch(x, chunk - kRing, place.steps);
      end_group();
    }
  }
  if (slab.ranks > 1) wait_cluster();
}

template <class T>
cudaError_t launch_forward(const NormInput& plan, Forward f, cudaStream_t stream) {
  if (plan.batch == 0 || plan.x.total == 0) return cudaSuccess;
  Limits limits;
  if (const cudaError_t error = describe(&limits); error != cudaSuccess) return error;
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = whole_vectors(plan.x, kVector);
  const Flow flow = flow_of<T>(limits, plan.x, plan.batch, plan.pixels, plan.groups, vectors);
  if (flow.blocks > 0) return flow_forward(plan, flow, limits, vectors, f.to, f.silu, f.y, stream);
  Need need = kNeed;
  need.arrays = f.y ? 1 : 0;
  f.slab = cut_slab(limits, need, plan.batch, plan.pixels, plan.x.total, plan.x.total / plan.groups,
                    vectors ? kVector : 1, sizeof(T));
  check(f.slab, limits);
  f.x = sources(plan.x);
  f.scale = plan.scale;
  f.offset = plan.offset;
  f.eps = plan.eps;
  return launch(vectors ? group_norm_forward<T, kVector> : group_norm_forward<T, 1>, grid_of(f.slab, plan.batch),
                f.slab.threads, f.slab.held + f.slab.scratch, stream, f);
}

cudaError_t forward(const NormInput& plan, const Forward& f, cudaStream_t stream) {
  return by_type(plan.type, [&](auto nought) { return launch_forward<decltype(nought)>(plan, f, stream); });
}

}  // namespace

cudaError_t norm_forward(const NormForward& plan, cudaStream_t stream) {
  Forward f{};
  f.silu = plan.silu;
  f.y = plan.y;
  f.to = {nullptr, nullptr, plan.mean, plan.inverse};
  return forward(plan, f, stream);
}

cudaError_t norm_statistics(const NormStatistics& plan, cudaStream_t stream) {
  Forward f{};
  f.to = {plan.a, plan.b, plan.mean, plan.inverse};
  return forward(plan, f, stream);
}

}  // namespace jaxunet::cuda
