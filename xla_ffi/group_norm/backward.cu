// GroupNorm backward: the sums over pixels and the gradient of every part of x, in one launch; the gradients of scale
// and offset from the sums, where they are wanted, in another. Large images flow instead.
#include "../by_type.cuh"
#include "flow.cuh"
#include "flows.h"
#include "gradient.cuh"
#include "kernels.h"

namespace jaxunet::cuda {
namespace {

struct Backward {
  Slab slab;
  Operands of;
};

// The block's scratch memory: of channels, but for `partial`.
struct Scratch {
  float* partial;  // both sums, of each row of warps
  float4* sums;    // x, y: both sums of the block's pixels, for the cluster to read
  float *scale, *offset, *mean, *inverse;
  float *constant, *slope;              // both sums of all pixels, times scale
  float *group_constant, *group_slope;  // what they subtract from the gradient: constant + (x - mean) · slope

  __device__ Scratch(const Slab& slab, int own, char* memory) {
    sums = reinterpret_cast<float4*>(memory);
    scale = reinterpret_cast<float*>(sums + own);
    offset = scale + own;
    mean = offset + own;
    inverse = mean + own;
    constant = inverse + own;
    slope = constant + own;
    group_constant = slope + own;
    group_slope = group_constant + own;
    partial = group_slope + own;
  }
};
constexpr Need kNeed{2, 256, 2 * sizeof(float), sizeof(float4) + 8 * sizeof(float)};

// Sums over the rows of a warp. In each step two lanes exchange halves of what they have, so that in the end every lane
// has the sums of few of the values: `kept` from `base` on, none where another lane has the same.
template <int kStep, int kHave, int N>
__device__ void fold(float (&values)[N], const Place& place, int lane_bits, int* base, int* kept) {
  if constexpr (kStep > 0) {
    if (kStep < 1 << lane_bits) return;
    const bool upper = (place.lane & kStep) != 0;
    if constexpr (kHave > 1) {
      constexpr int kHalf = kHave / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float given = upper ? values[i] : values[i + kHalf], mine = upper ? values[i + kHalf] : values[i];
        values[i] = mine + __shfl_xor_sync(~0u, given, kStep);
      }
      if (upper) *base += kHalf;
      *kept = kHalf;
      fold<kStep / 2, kHalf>(values, place, lane_bits, base, kept);
    } else {
      values[0] += __shfl_xor_sync(~0u, values[0], kStep);
      if (upper) *kept = 0;
      fold<kStep / 2, 1>(values, place, lane_bits, base, kept);
    }
  }
}

// kAdded tensors are added to dx.
template <class T, int V, int kAdded>
__global__ void __launch_bounds__(512, 1) group_norm_backward(const __grid_constant__ Backward g) {
  const Slab& slab = g.slab;
  const int own = slab.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const Place place(slab, V);
  const Stream<T, V> x(slab, place, g.of.x), dy(slab, place, g.of.dy);
  const Ring<T, V> ring_x{reinterpret_cast<Vector<T, V>*>(shared_memory()), slab.depth};
  const Ring<T, V> ring_dy{reinterpret_cast<Vector<T, V>*>(shared_memory() + slab.held / 2), slab.depth};
  const auto fetch = [&](int chunk) {
    ring_x.fetch(x, chunk, place.steps);
    ring_dy.fetch(dy, chunk, place.steps);
  };
#pragma unroll 1
  for (int chunk = 0; chunk < kRing; ++chunk) {
    fetch(chunk);
    end_group();
  }
  // Meanwhile:
  const Scratch scratch(slab, own, shared_memory() + slab.held);
  const int there = min(own, slab.channels - first), threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    scratch.scale[c] = of_sample(g.of.scale)[first + c];
    scratch.offset[c] = of_sample(g.of.offset)[first + c];
    scratch.mean[c] = of_sample(g.of.mean)[first + c];
    scratch.inverse[c] = of_sample(g.of.inverse)[first + c];
  }
  __syncthreads();
  // z = (x - mean) · factor + offset
  float mean[V] = {}, factor[V] = {}, offset[V] = {};
  if (place.steps > 0) {
    float inverse[V];
    load_floats(scratch.mean + place.local, mean);
    load_floats(scratch.inverse + place.local, inverse);
    load_floats(scratch.scale + place.local, factor);
    load_floats(scratch.offset + place.local, offset);
#pragma unroll
    for (int j = 0; j < V; ++j) factor[j] *= inverse[j];
  }

  const int rows = threads / 32 / slab.tiles;
  {
    // Of dz, then of dz · (x - mean).
    float sums[2 * V] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < slab.chunks; ++chunk) {
      wait_group<kRing - 1>();
      const int start = chunk * slab.depth, count = min(place.steps - start, slab.depth);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float value[V], given[V];
        ring_x.slot(chunk, i)->get(value);
        ring_dy.slot(chunk, i)->get(given);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float away = value[j] - mean[j];
          const float dz = derivative<T>(given[j], away * factor[j] + offset[j], g.of.silu, &value[j]);
          sums[j] += dz;
          sums[V + j] += dz * away;
        }
        if (g.of.active) {
          Vector<T, V> again;
          again.set(value);
          *Stream<T, V>(slab, place, g.of.active).at(start + i) = again;
        }
      }
      fetch(chunk + kRing);
      end_group();
    }
    int base = 0, kept = 2 * V;
    fold<16, 2 * V>(sums, place, slab.lane_bits, &base, &kept);
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
      const int which = (base + i) / V;
      if (i < kept && place.present) {
        scratch.partial[(2 * place.warp_row + which) * own + place.local + (base + i) % V] = sums[i];
      }
    }
  }
  const Stream<T, V> added[kMaxAdded] = {{slab, place, g.of.added[0]}, {slab, place, g.of.added[1]}};
  // While memory has nothing else to do, it brings what is added to dx first.
  const auto fetch_added = [&](int chunk) {
    if constexpr (kAdded > 0) {
      const int start = chunk * slab.depth, end = min(start + slab.depth, place.steps);
#pragma unroll 1
      for (int step = start; step < end; ++step) {
#pragma unroll
        for (int k = 0; k < kAdded; ++k) to_cache(added[k].at(step));
      }
    }
  };
#pragma unroll 1
  for (int chunk = max(slab.chunks - kRing, 0); kAdded > 0 && chunk < slab.chunks; ++chunk) fetch_added(chunk);
  __syncthreads();

  const auto sums_of_block = [&](int c) {
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      total.x += scratch.partial[2 * r * own + c];
      total.y += scratch.partial[(2 * r + 1) * own + c];
    }
    return total;
  };
  if (slab.ranks > 1) {
#pragma unroll 1
    for (int c = threadIdx.x; c < there; c += threads) scratch.sums[c] = sums_of_block(c);
    arrive_cluster();
    wait_cluster();
  }
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    float4 total = make_float4(0, 0, 0, 0);
    if (slab.ranks == 1) {
      total = sums_of_block(c);
    } else {
#pragma unroll 1
      for (int rank = 0; rank < slab.ranks; ++rank) {
        const float4 part = of_block(scratch.sums + c, rank);
        total.x += part.x;
        total.y += part.y;
      }
    }
    total.y *= scratch.inverse[c];
    if (blockIdx.x == 0) {
      float* const to = g.of.sums + 2 * static_cast<int64_t>(blockIdx.z) * slab.channels + first + c;
      to[0] = total.x;
      to[slab.channels] = total.y;
    }
    scratch.constant[c] = scratch.scale[c] * total.x;
    scratch.slope[c] = scratch.scale[c] * total.y;
  }
  if (slab.ranks > 1) arrive_cluster();  // has read; whoever ends waits for it
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    const int group = c / slab.group * slab.group;
    float constant = 0, slope = 0;
#pragma unroll 4
    for (int i = 0; i < slab.group; ++i) {
      constant += scratch.constant[group + i];
      slope += scratch.slope[group + i];
    }
    const float inverse = scratch.inverse[c];
    const float share = inverse / (static_cast<float>(slab.group) * static_cast<float>(slab.pixels));
    scratch.group_constant[c] = constant * share;
    scratch.group_slope[c] = slope * share * inverse;
  }
  __syncthreads();

  float constant[V] = {}, slope[V] = {};
  if (place.steps > 0) {
    load_floats(scratch.group_constant + place.local, constant);
    load_floats(scratch.group_slope + place.local, slope);
  }
  const Stream<T, V> dx(slab, place, g.of.dx);
  // What was read last is still there; what has gone comes once more.
#pragma unroll 1
  for (int chunk = slab.chunks - 1; chunk >= 0; --chunk) {
    wait_group<kRing - 1>();
    const int start = chunk * slab.depth, count = min(place.steps - start, slab.depth);
#pragma unroll(kAdded > 0 ? 2 : 1)
    for (int i = 0; i < count; ++i) {
      Vector<T, V> others[kAdded > 0 ? kAdded : 1];
#pragma unroll
      for (int k = 0; k < kAdded; ++k) others[k] = read_only(added[k].at(start + i));
      float value[V], given[V];
      ring_x.slot(chunk, i)->get(value);
      ring_dy.slot(chunk, i)->get(given);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float away = value[j] - mean[j];
        float active;
        const float dz = derivative<T>(given[j], away * factor[j] + offset[j], g.of.silu, &active);
        value[j] = factor[j] * dz - (constant[j] + away * slope[j]);
      }
#pragma unroll
      for (int k = 0; k < kAdded; ++k) {
        others[k].get(given);
#pragma unroll
        for (int j = 0; j < V; ++j) value[j] += given[j];
      }
      Vector<T, V> out;
      out.set(value);
      *dx.at(start + i) = out;
    }
    if (chunk >= kRing) {
      fetch(chunk - kRing);
      fetch_added(chunk - kRing);
    }
    end_group();
  }
  if (slab.ranks > 1) wait_cluster();
}

__global__ void __launch_bounds__(kLanes* kSlices) group_norm_parameters(const __grid_constant__ Parameters p) {
  add_samples(p, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
}

cudaError_t add_all_samples(const NormGradient& plan, cudaStream_t stream) {
  if (!plan.samples) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_of(plan.x.total, kLanes)), 2);
  return launch_plainly(group_norm_parameters, grid, kLanes * kSlices, stream, parameters_of(plan));
}

template <class T>
cudaError_t launch_backward(const NormGradient& plan, cudaStream_t stream) {
  Limits limits;
  cudaError_t error = describe(&limits);
  if (error != cudaSuccess) return error;
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = whole_vectors(plan.x, kVector);
  const Flow flow = flow_of<T>(limits, plan.x, plan.batch, plan.pixels, plan.groups, vectors);
  if (flow.blocks > 0) return flow_gradient(plan, flow, limits, vectors, stream);
  const Slab slab = cut_slab(limits, kNeed, plan.batch, plan.pixels, plan.x.total, plan.x.total / plan.groups,
                             vectors ? kVector : 1, sizeof(T));
  check(slab, limits);
  const Backward g{slab, operands_of(plan)};
  const auto kernel = by_additions(plan.additions, [&](auto count) {
    return vectors ? group_norm_backward<T, kVector, count> : group_norm_backward<T, 1, count>;
  });
  error = launch(kernel, grid_of(slab, plan.batch), slab.threads, slab.held + slab.scratch, stream, g);
  return error == cudaSuccess ? add_all_samples(plan, stream) : error;
}

cudaError_t backward(const NormGradient& plan, cudaStream_t stream) {
  return by_type(plan.type, [&](auto nought) { return launch_backward<decltype(nought)>(plan, stream); });
}

}  // namespace

cudaError_t norm_gradient(const NormGradient& plan, cudaStream_t stream) {
  if (plan.x.total == 0) return cudaSuccess;
  return plan.batch > 0 ? backward(plan, stream) : add_all_samples(plan, stream);
}

}  // namespace jaxunet::cuda
