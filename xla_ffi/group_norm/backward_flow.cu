// GroupNorm backward of large images: a kernel sums over the pixels; another writes the gradient of every part of x,
// while a few of its blocks add the sums of all samples for scale and offset, where these are wanted.
#include "../by_type.cuh"
#include "flow.cuh"
#include "flows.h"
#include "gradient.cuh"

namespace jaxunet::cuda {
namespace {

struct Gradient {
  Flow flow;
  Operands of;
  Parameters parameters;
  int adding;  // 1 where blocks add the samples' sums, else 0
};

constexpr int kAhead = 4;  // steps, of each tensor

// Of x, dy and kAdded tensors that are added to dx; where there are some, each `get` is followed by an `add`.
template <class T, int V, int kAdded = 0>
struct Pipes {
  using One = Pipe<T, V, kAhead>;
  static constexpr int64_t kBytes = (2 + kAdded) * One::kBytes;
  One x, dy;
  int64_t away[kMaxAdded];  // bytes from where x goes on to the tensors that are added, where x was read last

  __device__ Pipes(const Gradient& g, const Spot& spot, int64_t sample)
      : x(Walk<T, V>(g.flow, spot, g.of.x, sample), shared_memory()),
        dy(Walk<T, V>(g.flow, spot, g.of.dy, sample), shared_memory() + One::kBytes) {
#pragma unroll
    for (int k = 0; k < kAdded; ++k) {
      const auto* const there = Walk<T, V>(g.flow, spot, g.of.added[k], sample).at;
      away[k] = reinterpret_cast<const char*>(there) - reinterpret_cast<const char*>(x.from.at + x.from.stride);
    }
#pragma unroll 1
    for (int step = 0; step < kAhead; ++step) {
      fetch(spot, step);
      if constexpr (kAdded > 0) fetch_added(spot, step);
    }
  }
  __device__ void get(const Spot& spot, int step, float (&value)[V], float (&given)[V]) {
    wait_group<kAhead - 1>();
    x.get(step, value);
    dy.get(step, given);
    fetch(spot, step + kAhead);
  }
  __device__ void add(const Spot& spot, int step, float (&value)[V]) {
    if constexpr (kAdded > 0) {
#pragma unroll
      for (int k = 0; k < kAdded; ++k) {
        float more[V];
        const Vector<T, V> here = *slot(k, step);
        here.get(more);
#pragma unroll
        for (int j = 0; j < V; ++j) value[j] += more[j];
      }
      fetch_added(spot, step + kAhead);
    }
  }

  // The scratch memory behind the pipes, aligned as float4 are.
  __device__ static float4* scratch() { return reinterpret_cast<float4*>(shared_memory() + kBytes); }

 private:
  __device__ Vector<T, V>* slot(int k, int step) const { return x.slot(step) + (2 + k) * kAhead * kFlowThreads; }
  __device__ void fetch(const Spot& spot, int step) {
    if (step < spot.steps) {
      x.fetch(step);
      dy.fetch(step);
    }
    if constexpr (kAdded == 0) end_group();
  }
  __device__ void fetch_added(const Spot& spot, int step) {
    if (step < spot.steps) {
#pragma unroll
      for (int k = 0; k < kAdded; ++k) {
        const char* const from = reinterpret_cast<const char*>(x.from.at) + away[k];
        if constexpr (V * sizeof(T) == 16) {
          copy16(slot(k, step), from);
        } else {
          *slot(k, step) = *reinterpret_cast<const Vector<T, V>*>(from);
        }
      }
    }
    end_group();
  }
};

template <class T, int V>
__device__ Affine<T, V> affine_of(const Gradient& g, const Spot& spot, int64_t sample) {
  Affine<T, V> norm;
  if (spot.steps > 0) {
    norm.load(row_of(g.of.scale, sample, spot.channel), row_of(g.of.offset, sample, spot.channel),
              row_of(g.of.mean, sample, spot.channel), row_of(g.of.inverse, sample, spot.channel));
  }
  return norm;
}

// dz from dy, and the activation where it is not null.
template <class T, int V>
__device__ void derive(const Affine<T, V>& norm, bool silu, const float (&value)[V], float (&given)[V],
                       float (&active)[V]) {
  if (silu) {
#pragma unroll
    for (int j = 0; j < V; ++j) given[j] = derivative<T>(given[j], norm.at(value, j), true, &active[j]);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) active[j] = norm.at(value, j);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kFlowThreads, kFlowBlocks) group_norm_sums(const __grid_constant__ Gradient g) {
  const Flow& flow = g.flow;
  const int own = flow.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const Spot spot(flow, V);
  Pipes<T, V> pipes(g, spot, blockIdx.z);
  float4* const totals = pipes.scratch();                         // of a channel: x, y, both sums of the block
  float* const partial = reinterpret_cast<float*>(totals + own);  // both sums, of each row
  {
    const auto norm = affine_of<T, V>(g, spot, blockIdx.z);
    float constant[V] = {}, slope[V] = {};  // sums of dz, and of dz · value
#pragma unroll 1
    for (int step = 0; step < spot.steps; ++step) {
      float value[V], given[V], active[V];
      pipes.get(spot, step, value, given);
      norm.centre(value);
      derive(norm, g.of.silu, value, given, active);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        constant[j] += given[j];
        slope[j] += given[j] * value[j];
      }
    }
    if (spot.row < flow.rows) {
      if constexpr (!kPivot<T>) {
        float mean[V];
        load_floats(row_of(g.of.mean, blockIdx.z, spot.channel), mean);
#pragma unroll
        for (int j = 0; j < V; ++j) slope[j] -= mean[j] * constant[j];
      }
      float* const row = partial + 2 * spot.row * own + spot.local;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        row[j] = constant[j];
        row[own + j] = slope[j];
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * own; i += kFlowThreads) {
    float total = 0;
#pragma unroll 4
    for (int row = 0; row < flow.rows; ++row) total += partial[2 * row * own + i];
    const bool second = i >= own;
    float4& to = totals[second ? i - own : i];
    (second ? to.y : to.x) = total;
  }
  arrive_cluster();
  wait_cluster();
  const int rank = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (int c = rank * kFlowThreads + static_cast<int>(threadIdx.x); c < own; c += flow.ranks * kFlowThreads) {
    float constant = 0, slope = 0;
#pragma unroll 4
    for (int other = 0; other < flow.ranks; ++other) {
      const float4 part = of_block(totals + c, other);
      constant += part.x;
      slope += part.y;
    }
    float* const to = g.of.sums + 2 * static_cast<int64_t>(blockIdx.z) * flow.channels + first + c;
    to[0] = constant;
    to[flow.channels] = slope * *row_of(g.of.inverse, blockIdx.z, first + c);
  }
  arrive_cluster();  // has read; whoever ends waits for it
  wait_cluster();
}

// What was read last comes first. Blocks of z < adding add the samples' sums instead.
template <class T, int V, int kAdded>
__global__ void __launch_bounds__(kFlowThreads, kFlowBlocks) group_norm_dx(const __grid_constant__ Gradient g) {
  static_assert(kLanes * kSlices == kFlowThreads);
  const Flow& flow = g.flow;
  if (static_cast<int>(blockIdx.z) < g.adding) {
    const int tiles = (flow.channels + kLanes - 1) / kLanes, blocks = flow.ranks * flow.blocks;
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.y) * flow.ranks + static_cast<int>(blockIdx.x); i < 2 * tiles; i += blocks) {
      add_samples(g.parameters, i >> 1, i & 1);
      __syncthreads();
    }
    return;
  }
  const int sample = g.parameters.batch - 1 + g.adding - static_cast<int>(blockIdx.z);
  const int own = flow.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  Spot spot(flow, V);
  spot.turn(flow);
  Pipes<T, V, kAdded> pipes(g, spot, sample);
  // Meanwhile what the groups subtract from the gradient: constant + (x - mean) · slope.
  auto *const constants = reinterpret_cast<float*>(pipes.scratch()), *const slopes = constants + own;
  float *const of_group = slopes + own, *const slopes_of_group = of_group + own;
  const float* const sums = g.of.sums + 2 * static_cast<int64_t>(sample) * flow.channels + first;
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += kFlowThreads) {
    const float scale = *row_of(g.of.scale, sample, first + c);
    constants[c] = scale * sums[c];
    slopes[c] = scale * sums[flow.channels + c];
    of_group[c] = *row_of(g.of.inverse, sample, first + c);  // for the same thread
    slopes_of_group[c] = *row_of(g.of.mean, sample, first + c);
  }
  const auto norm = affine_of<T, V>(g, spot, sample);
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += kFlowThreads) {
    const int group = c / flow.group * flow.group;
    float constant = 0, slope = 0;
#pragma unroll 4
    for (int i = 0; i < flow.group; ++i) {
      constant += constants[group + i];
      slope += slopes[group + i];
    }
    const float inverse = of_group[c], mean = slopes_of_group[c];
    const float share = inverse / (static_cast<float>(flow.group) * static_cast<float>(flow.pixels));
    constant *= share;
    slope *= share * inverse;
    if constexpr (!kPivot<T>) constant -= mean * slope;
    of_group[c] = constant;
    slopes_of_group[c] = slope;
  }
  __syncthreads();
  if (spot.steps == 0) return;

  float constant[V], slope[V];
  load_floats(of_group + spot.local, constant);
  load_floats(slopes_of_group + spot.local, slope);
  Walk<T, V> dx(flow, spot, g.of.dx, sample), again(flow, spot, g.of.active, sample);
  dx.stride = pipes.x.from.stride;  // the same, as the compiler cannot know
  again.stride = pipes.dy.from.stride;
#pragma unroll 1
  for (int step = 0; step < spot.steps; ++step) {
    float value[V], given[V], active[V];
    pipes.get(spot, step, value, given);
    norm.centre(value);
    derive(norm, g.of.silu, value, given, active);
    Vector<T, V> out;
    if (g.of.active) {
      out.set(active);
      *again.next() = out;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = norm.factor[j] * given[j] - (constant[j] + value[j] * slope[j]);
    pipes.add(spot, step, value);
    out.set(value);
    *dx.next() = out;
  }
}

template <class T, int V>
cudaError_t launch_flow(const NormGradient& plan, const Flow& flow, const Limits& limits, cudaStream_t stream) {
  Gradient g{flow, operands_of(plan), parameters_of(plan), plan.samples ? 1 : 0};
  const int64_t own = static_cast<int64_t>(flow.vectors) * V;
  const int64_t sums = own * static_cast<int64_t>(sizeof(float4) + 2 * sizeof(float) * flow.rows);
  const cudaError_t error =
      launch(group_norm_sums<T, V>, grid_of(flow, plan.batch), kFlowThreads, Pipes<T, V>::kBytes + sums, stream, g);
  if (error != cudaSuccess) return error;
  const int64_t layers = plan.batch + g.adding;
  g.flow = respread(flow, limits, layers);
  return by_additions(plan.additions, [&](auto count) {
    const int64_t shared = Pipes<T, V, count>::kBytes + 4 * own * static_cast<int64_t>(sizeof(float));
    return launch(group_norm_dx<T, V, count>, grid_of(g.flow, layers), kFlowThreads, shared, stream, g, false);
  });
}

template <class T>
cudaError_t launch_flow(const NormGradient& plan, const Flow& flow, const Limits& limits, bool vectors,
                        cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  return vectors ? launch_flow<T, kVector>(plan, flow, limits, stream) : launch_flow<T, 1>(plan, flow, limits, stream);
}

}  // namespace

cudaError_t flow_gradient(const NormGradient& plan, const Flow& flow, const Limits& limits, bool vectors,
                          cudaStream_t stream) {
  return by_type(plan.type,
                 [&](auto nought) { return launch_flow<decltype(nought)>(plan, flow, limits, vectors, stream); });
}

}  // namespace jaxunet::cuda
