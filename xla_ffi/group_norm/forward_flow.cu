// GroupNorm forward of large images: a kernel reads them for the statistics, another for the activation.
#include "../by_type.cuh"
#include "flow.cuh"
#include "flows.h"
#include "statistics.cuh"

namespace jaxunet::cuda {
namespace {

struct Statistics {
  Flow flow;
  Sources x;
  Rows scale, offset;
  float eps;
  Results to;
};

constexpr int kStatisticsAhead = 8,
              kFinishAhead = 4;  // steps, so that 32 KiB of a multiprocessor's reads are on their way

// Mean and deviations of the thread's pixels, by channel. They are taken from the thread's first pixel: as one of the
// numbers it is no further from their mean than all of them together deviate, so that the difference of squares loses
// no more than their sum does.
template <class T, int V>
__device__ void accumulate(const Spot& spot, Pipe<T, V, kStatisticsAhead>& pipe, const float (&pivot)[V],
                           float (&mean)[V], float (&deviation)[V]) {
  float sum[V] = {};
  wait_group<kStatisticsAhead - 1>();
  if (spot.steps > 0) {
    pipe.get(0, mean);
    if constexpr (kPivot<T>) {
#pragma unroll
      for (int j = 0; j < V; ++j) mean[j] -= pivot[j];
    }
  }
#pragma unroll 1
  for (int step = 0; step < spot.steps; ++step) {
    wait_group<kStatisticsAhead - 1>();
    float value[V];
    pipe.get(step, value);
    if (step + kStatisticsAhead < spot.steps) pipe.fetch(step + kStatisticsAhead);
    end_group();
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (kPivot<T>) value[j] -= pivot[j];
      const float away = value[j] - mean[j];
      sum[j] += away;
      deviation[j] += away * away;
    }
  }
  const float share = 1.0f / static_cast<float>(max(spot.steps, 1));
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float away = sum[j] * share;
    mean[j] += away;
    deviation[j] = fmaxf(deviation[j] - sum[j] * away, 0.0f);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kFlowThreads, 4) group_norm_statistics(const __grid_constant__ Statistics f) {
  const Flow& flow = f.flow;
  const int own = flow.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const Spot spot(flow, V);
  Pipe<T, V, kStatisticsAhead> pipe(Walk<T, V>(flow, spot, f.x, blockIdx.z), shared_memory());
#pragma unroll 1
  for (int step = 0; step < kStatisticsAhead; ++step) {
    if (step < spot.steps) pipe.fetch(step);
    end_group();
  }
  // Meanwhile:
  const Cut cut{own, flow.group, flow.piece_bits, flow.rows, flow.ranks};
  const Scratch scratch(cut, shared_memory() + pipe.kBytes);
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += kFlowThreads) {
    scratch.scale[c] = *row_of(f.scale, blockIdx.z, first + c);
    scratch.offset[c] = *row_of(f.offset, blockIdx.z, first + c);
    if constexpr (kPivot<T>) {
      int width;
      scratch.pivot[c] = wide(*column<T>(f.x, first + c / flow.group * flow.group, blockIdx.z, flow.pixels, &width));
    }
  }
  {
    float pivot[V] = {}, mean[V] = {}, deviation[V] = {};
    if constexpr (kPivot<T>) {
      __syncthreads();
      if (spot.steps > 0) load_floats(scratch.pivot + spot.local, pivot);
    }
    accumulate(spot, pipe, pivot, mean, deviation);
    const auto count = static_cast<float>(spot.steps);
    join_neighbours(cut.piece_bits, count, mean, deviation);
    if (spot.row < flow.rows) {
      float4* const row = scratch.partial + spot.row * (own >> cut.piece_bits);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if ((j & ((1 << cut.piece_bits) - 1)) != 0) continue;
        row[(spot.local + j) >> cut.piece_bits] =
            make_float4(static_cast<float>(1 << cut.piece_bits) * count, mean[j], deviation[j], 0);
      }
    }
  }
  __syncthreads();
  join_groups(cut, f.eps, scratch);
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; blockIdx.x == 0 && c < own; c += kFlowThreads) {
    finish(f.to, scratch, cut, kPivot<T>, c, static_cast<int64_t>(blockIdx.z) * flow.channels + first + c);
  }
  if (flow.ranks > 1) wait_cluster();
}

struct Finish {
  Flow flow;
  int batch;
  Sources x;
  Rows scale, offset, mean, inverse;
  bool silu;
  void* y;
};

// What was read last comes first.
template <class T, int V>
__global__ void __launch_bounds__(kFlowThreads, kFlowBlocks) group_norm_finish(const __grid_constant__ Finish f) {
  const Flow& flow = f.flow;
  const int sample = f.batch - 1 - static_cast<int>(blockIdx.z);
  Spot spot(flow, V);
  spot.turn(flow);
  if (spot.steps == 0) return;
  Pipe<T, V, kFinishAhead> pipe(Walk<T, V>(flow, spot, f.x, sample), shared_memory());
#pragma unroll 1
  for (int step = 0; step < kFinishAhead; ++step) {
    if (step < spot.steps) pipe.fetch(step);
    end_group();
  }
  Walk<T, V> y(flow, spot, f.y, sample);
  Affine<T, V> norm;
  norm.load(row_of(f.scale, sample, spot.channel), row_of(f.offset, sample, spot.channel),
            row_of(f.mean, sample, spot.channel), row_of(f.inverse, sample, spot.channel));
#pragma unroll 1
  for (int step = 0; step < spot.steps; ++step) {
    wait_group<kFinishAhead - 1>();
    float value[V];
    pipe.get(step, value);
    if (step + kFinishAhead < spot.steps) pipe.fetch(step + kFinishAhead);
    end_group();
    norm.centre(value);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = norm.at(value, j);
    if (f.silu) {
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] *= sigmoid<T>(value[j]);
    }
    Vector<T, V> out;
    out.set(value);
    *y.next() = out;
  }
}

template <class T, int V>
cudaError_t launch_flow(const NormInput& plan, const Flow& flow, const Limits& limits, const Results& to, bool silu,
                        void* y, cudaStream_t stream) {
  const Statistics f{flow, sources(plan.x), plan.scale, plan.offset, plan.eps, to};
  const int64_t own = static_cast<int64_t>(flow.vectors) * V, pieces = own >> flow.piece_bits;
  const int64_t scratch = (flow.rows * pieces + own / flow.group) * static_cast<int64_t>(sizeof(float4)) +
                          (3 * own + 2 * own / flow.group) * static_cast<int64_t>(sizeof(float));
  const cudaError_t error = launch(group_norm_statistics<T, V>, grid_of(flow, plan.batch), kFlowThreads,
                                   Pipe<T, V, kStatisticsAhead>::kBytes + scratch, stream, f);
  if (error != cudaSuccess || y == nullptr) return error;
  const Flow back = respread(flow, limits, plan.batch);
  const Finish g{back,
                 static_cast<int>(plan.batch),
                 sources(plan.x),
                 plan.scale,
                 plan.offset,
                 {to.mean, plan.x.total},
                 {to.inverse, plan.x.total},
                 silu,
                 y};
  return launch(group_norm_finish<T, V>, grid_of(back, plan.batch), kFlowThreads, Pipe<T, V, kFinishAhead>::kBytes,
                stream, g, false);
}

template <class T>
cudaError_t launch_flow(const NormInput& plan, const Flow& flow, const Limits& limits, bool vectors, const Results& to,
                        bool silu, void* y, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  return vectors ? launch_flow<T, kVector>(plan, flow, limits, to, silu, y, stream)
                 : launch_flow<T, 1>(plan, flow, limits, to, silu, y, stream);
}

}  // namespace

cudaError_t flow_forward(const NormInput& plan, const Flow& flow, const Limits& limits, bool vectors, const Results& to,
                         bool silu, void* y, cudaStream_t stream) {
  return by_type(plan.type, [&](auto nought) {
    return launch_flow<decltype(nought)>(plan, flow, limits, vectors, to, silu, y, stream);
  });
}

}  // namespace jaxunet::cuda
