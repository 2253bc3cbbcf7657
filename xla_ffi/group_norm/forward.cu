// GroupNorm forward: the statistics alone, or with the activation in the same launch.
#include "block.cuh"
#include "kernels.h"

namespace jaxunet::cuda {
namespace {

struct Forward {
  Slab slab;
  Sources x;
  Rows scale, offset;
  float eps;
  bool silu;
  void* y;                        // null: statistics only
  float *a, *b, *mean, *inverse;  // a, b: null with y
};

// Samples are kept as float4: count, mean, sum of squared deviations from it. Their union (Chan, Golub & LeVeque 1979)
// has the weighted mean, and the deviations besides those of the means.

constexpr int kTeam = 8;  // lanes that join a group's samples; at least a cluster's blocks

__device__ inline float sum_of_team(float x) {
#pragma unroll
  for (int step = kTeam / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The union of a team's samples: visit(take) calls take(sample) for each of this lane's.
template <class Visit>
__device__ float4 join(const Visit& visit) {
  float count = 0, sum = 0, deviation = 0;
  visit([&](const float4& s) {
    count += s.x;
    sum += s.x * s.y;
  });
  count = sum_of_team(count);
  sum = sum_of_team(sum);
  const float mean = count > 0 ? sum / count : 0.0f;
  visit([&](const float4& s) {
    const float away = s.y - mean;
    deviation += s.z + s.x * away * away;
  });
  return make_float4(count, mean, sum_of_team(deviation), 0);
}

// float32 numbers are taken from one of their group, so that a large mean costs no bits.
template <class T>
constexpr bool kPivot = sizeof(T) == 4;

// The block's scratch memory.
struct Scratch {
  float4 *partial, *groups;       // samples of pieces, a row for each row of warps; of groups, for the cluster to read
  float *scale, *offset, *pivot;  // of channels; in the end a channel's y = (x - pivot) * scale + offset
  float *mean, *inverse;          // of groups

  __device__ Scratch(const Slab& slab, int own, char* memory) {
    partial = reinterpret_cast<float4*>(memory);
    groups = partial + (blockDim.x / 32 / slab.tiles) * (own >> slab.piece_bits);
    scale = reinterpret_cast<float*>(groups + own / slab.group);
    offset = scale + own;
    pivot = offset + own;
    mean = pivot + own;
    inverse = mean + own / slab.group;
  }
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
  // Neighbours of one piece, which have the same count; the first takes all.
#pragma unroll
  for (int width = 1; width < V; width *= 2) {
    if (width >= 1 << slab.piece_bits) break;
#pragma unroll
    for (int j = 0; j < V; j += 2 * width) {
      const float away = mean[j + width] - mean[j];
      mean[j] += 0.5f * away;
      deviation[j] += deviation[j + width] + 0.5f * static_cast<float>(width) * count * away * away;
    }
  }
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

// From pieces of warps to groups of the block, then of the cluster: their mean and inverse deviation.
__device__ void join_groups(const Slab& slab, int own, float eps, const Scratch& scratch) {
  const int groups = own / slab.group, pieces = slab.group >> slab.piece_bits, row = own >> slab.piece_bits;
  const int team = static_cast<int>(threadIdx.x) / kTeam, member = static_cast<int>(threadIdx.x) % kTeam;
  const int teams = static_cast<int>(blockDim.x) / kTeam, rows = static_cast<int>(blockDim.x) / 32 / slab.tiles;
  const auto finish = [&](int group, const float4& all) {
    scratch.mean[group] = all.y;
    scratch.inverse[group] = rsqrtf(all.z / all.x + eps);
  };
  // All lanes go round as often, for the sake of the shuffles.
#pragma unroll 1
  for (int start = 0; start < groups; start += teams) {
    const int group = start + team;
    const float4 all = join([&](const auto& take) {
#pragma unroll 1
      for (int r = group < groups ? member : rows; r < rows; r += kTeam) {
#pragma unroll 1
        for (int i = 0; i < pieces; ++i) take(scratch.partial[r * row + group * pieces + i]);
      }
    });
    if (group >= groups || member != 0) continue;
    if (slab.ranks == 1) {
      finish(group, all);
    } else {
      scratch.groups[group] = all;
    }
  }
  if (slab.ranks == 1) return;
  arrive_cluster();
  wait_cluster();
#pragma unroll 1
  for (int start = 0; start < groups; start += teams) {
    const int group = start + team;
    const bool there = group < groups && member < slab.ranks;
    const float4 part = there ? of_block(scratch.groups + group, member) : make_float4(0, 0, 0, 0);
    const float4 all = join([&](const auto& take) { take(part); });
    if (group < groups && member == 0) finish(group, all);
  }
  arrive_cluster();  // has read; whoever ends waits for it
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
  const Scratch scratch(slab, own, shared_memory() + slab.held);
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
  join_groups(slab, own, f.eps, scratch);
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    const float away = scratch.mean[c / slab.group], inverse = scratch.inverse[c / slab.group];
    const float mean = kPivot<T> ? scratch.pivot[c] + away : away;
    const float a = scratch.scale[c] * inverse, b = scratch.offset[c] - mean * a;
    if (blockIdx.x == 0) {
      const int64_t at = static_cast<int64_t>(blockIdx.z) * slab.channels + first + c;
      f.mean[at] = mean;
      f.inverse[at] = inverse;
      if (f.a) {
        f.a[at] = a;
        f.b[at] = b;
      }
    }
    scratch.scale[c] = a;
    // 16-bit numbers hold at most a few hundred deviations in their mean: one multiply-add loses nothing.
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
  switch (plan.type) {
    case Type::kFloat32:
      return launch_forward<float>(plan, f, stream);
    case Type::kFloat16:
      return launch_forward<__half>(plan, f, stream);
    default:
      return launch_forward<__nv_bfloat16>(plan, f, stream);
  }
}

}  // namespace

cudaError_t norm_forward(const NormForward& plan, cudaStream_t stream) {
  Forward f{};
  f.silu = plan.silu;
  f.y = plan.y;
  f.mean = plan.mean;
  f.inverse = plan.inverse;
  return forward(plan, f, stream);
}

cudaError_t norm_statistics(const NormStatistics& plan, cudaStream_t stream) {
  Forward f{};
  f.a = plan.a;
  f.b = plan.b;
  f.mean = plan.mean;
  f.inverse = plan.inverse;
  return forward(plan, f, stream);
}

}  // namespace jaxunet::cuda
