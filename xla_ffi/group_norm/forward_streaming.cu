// GroupNorm forward of large images in two launches (streaming.h): the formula is that of
// forward_smem_resident.cu.
//
// group_norm_statistics reduces x to the mean and inverse of each group. Grid: (cluster of 8
// blocks, channel blocks, batch); a cluster owns a sample's channels, and its blocks take rows of
// pixels in turns.
// - Prologue: start the copies of the first kStatisticsStages steps; load scale, offset, pivots.
// - Mainloop: wait for the oldest step, start the copy of a later one, update the thread's sums.
// - Epilogue: reduce over pieces, block (shared memory) and cluster (distributed shared memory);
//   the first block of the cluster writes.
//
// Its shared memory: the pipeline, [stage][thread] vectors of 16 bytes, then StatisticsScratch.
//
// group_norm_finish reads x once more and writes y = act(z). Grid: (ranks, channel blocks, batch),
// no clusters. It walks the samples and the pixels backwards, because the end of x is still in the
// L2 cache. Its shared memory is only the pipeline; it needs no barriers.
#include "common/dispatch_dtype.cuh"
#include "launch.h"
#include "statistics.cuh"
#include "streaming.cuh"

namespace jaxunet::cuda {
namespace {

struct Statistics {
  StreamingTiling tiling;
  TensorParts x;
  Rows scale, offset;
  float eps;
  StatisticsOutputs to;
};

// Steps in flight, 4 KiB per block each: about 32 KiB of loads of a multiprocessor hide the latency
// of its memory. To refit them, time the streaming kernels with half and with twice as many.
constexpr int kStatisticsStages = 8, kFinishStages = 4;

// Reduces a thread's pixels to the mean and m2 of each of its channels, by sums of (x - first) and
// (x - first)^2, where first is the thread's first pixel. Its squared distance from the mean is at
// most m2, because it is one of the numbers, so the difference of squares loses few bits.
template <class T, int V>
__device__ void reduce_thread(const StreamingTile& tile,
                              Pipeline<T, V, kStatisticsStages>& pipeline, const float (&pivot)[V],
                              float (&mean)[V], float (&m2)[V]) {
  float sum[V] = {};
  cp_async_wait<kStatisticsStages - 1>();
  if (tile.steps > 0) {
    pipeline.read(0, mean);
    if constexpr (kUsesPivot<T>) {
#pragma unroll
      for (int j = 0; j < V; ++j) mean[j] -= pivot[j];
    }
  }
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    cp_async_wait<kStatisticsStages - 1>();
    float value[V];
    pipeline.read(step, value);
    if (step + kStatisticsStages < tile.steps) pipeline.fetch(step + kStatisticsStages);
    cp_async_commit();
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (kUsesPivot<T>) value[j] -= pivot[j];
      const float away = value[j] - mean[j];
      sum[j] += away;
      m2[j] += away * away;
    }
  }
  const float share = 1.0f / static_cast<float>(max(tile.steps, 1));
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float away = sum[j] * share;
    mean[j] += away;
    m2[j] = fmaxf(m2[j] - sum[j] * away, 0.0f);
  }
}

// Writes the moments of a thread's pieces to its row of scratch.partial.
template <int V>
__device__ void write_pieces(const StreamingTile& tile, const ReductionShape& shape,
                             const StatisticsScratch& scratch, float (&mean)[V], float (&m2)[V]) {
  const auto count = static_cast<float>(tile.steps);
  merge_neighbours(shape.piece_bits, count, mean, m2);
  if (tile.row < shape.rows) {
    float4* const row = scratch.partial + tile.row * (shape.channels >> shape.piece_bits);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if ((j & ((1 << shape.piece_bits) - 1)) != 0) continue;
      row[(tile.local + j) >> shape.piece_bits] =
          make_float4(static_cast<float>(1 << shape.piece_bits) * count, mean[j], m2[j], 0);
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kStreamingThreads, 4)
    group_norm_statistics(const __grid_constant__ Statistics f) {
  const StreamingTiling& tiling = f.tiling;
  // Channels of the block, and the first of them.
  const int own = tiling.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const StreamingTile tile(tiling, V);
  Pipeline<T, V, kStatisticsStages> pipeline(VectorIterator<T, V>(tiling, tile, f.x, blockIdx.z),
                                             dynamic_smem());
#pragma unroll 1
  for (int step = 0; step < kStatisticsStages; ++step) {
    if (step < tile.steps) pipeline.fetch(step);
    cp_async_commit();
  }
  // While the copies arrive:
  const ReductionShape shape{own, tiling.group, tiling.piece_bits, tiling.rows, tiling.ranks};
  const StatisticsScratch scratch(shape, dynamic_smem() + pipeline.kBytes);
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += kStreamingThreads) {
    scratch.scale[c] = *channel_entry(f.scale, blockIdx.z, first + c);
    scratch.offset[c] = *channel_entry(f.offset, blockIdx.z, first + c);
    if constexpr (kUsesPivot<T>) {  // the first number of the group
      int stride;
      const int group_start = first + c / tiling.group * tiling.group;
      scratch.pivot[c] =
          wide(*find_channel<T>(f.x, group_start, blockIdx.z, tiling.pixels, &stride));
    }
  }
  {
    float pivot[V] = {}, mean[V] = {}, m2[V] = {};
    if constexpr (kUsesPivot<T>) {
      __syncthreads();
      if (tile.steps > 0) load_floats(scratch.pivot + tile.local, pivot);
    }
    reduce_thread(tile, pipeline, pivot, mean, m2);
    write_pieces(tile, shape, scratch, mean, m2);
  }
  __syncthreads();
  merge_groups(shape, f.eps, scratch);
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; blockIdx.x == 0 && c < own; c += kStreamingThreads) {
    write_coefficients(f.to, scratch, shape, kUsesPivot<T>, c,
                       static_cast<int64_t>(blockIdx.z) * tiling.channels + first + c);
  }
  if (tiling.ranks > 1) cluster_wait();
}

struct Finish {
  StreamingTiling tiling;
  int batch;
  TensorParts x;
  Rows scale, offset, mean, inverse;
  bool silu;
  void* y;
};

template <class T, int V>
__global__ void __launch_bounds__(kStreamingThreads, kStreamingBlocks)
    group_norm_finish(const __grid_constant__ Finish f) {
  const StreamingTiling& tiling = f.tiling;
  const int sample = f.batch - 1 - static_cast<int>(blockIdx.z);
  StreamingTile tile(tiling, V);
  tile.reverse(tiling);
  if (tile.steps == 0) return;
  Pipeline<T, V, kFinishStages> pipeline(VectorIterator<T, V>(tiling, tile, f.x, sample),
                                         dynamic_smem());
#pragma unroll 1
  for (int step = 0; step < kFinishStages; ++step) {
    if (step < tile.steps) pipeline.fetch(step);
    cp_async_commit();
  }
  VectorIterator<T, V> y(tiling, tile, f.y, sample);
  ChannelAffine<T, V> norm;
  norm.load(
      channel_entry(f.scale, sample, tile.channel), channel_entry(f.offset, sample, tile.channel),
      channel_entry(f.mean, sample, tile.channel), channel_entry(f.inverse, sample, tile.channel));
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    cp_async_wait<kFinishStages - 1>();
    float value[V];
    pipeline.read(step, value);
    if (step + kFinishStages < tile.steps) pipeline.fetch(step + kFinishStages);
    cp_async_commit();
    norm.centre(value);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = norm.at(value, j);
    if (f.silu) {
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] *= sigmoid<T>(value[j]);
    }
    Vector<T, V> out;
    out.from_floats(value);
    *y.next() = out;
  }
}

template <class T, int V>
cudaError_t launch_forward(const NormInput& plan, const StreamingTiling& tiling,
                           const DeviceLimits& limits, const ForwardOutputs& to,
                           cudaStream_t stream) {
  const Statistics f{tiling,   tensor_parts(plan.x), plan.scale, plan.offset,
                     plan.eps, to.statistics};
  const int64_t own = static_cast<int64_t>(tiling.vectors) * V, pieces = own >> tiling.piece_bits;
  const int64_t groups = own / tiling.group;
  const int64_t scratch_bytes =
      (tiling.rows * pieces + groups) * static_cast<int64_t>(sizeof(float4)) +
      (3 * own + 2 * groups) * static_cast<int64_t>(sizeof(float));
  const cudaError_t error =
      launch(group_norm_statistics<T, V>, grid_of(tiling, plan.batch), kStreamingThreads,
             Pipeline<T, V, kStatisticsStages>::kBytes + scratch_bytes, stream, f);
  if (error != cudaSuccess || to.y == nullptr) return error;
  const StreamingTiling second = second_pass_tiling(tiling, limits, plan.batch);
  const Finish g{second,
                 static_cast<int>(plan.batch),
                 tensor_parts(plan.x),
                 plan.scale,
                 plan.offset,
                 {to.statistics.mean, plan.x.total},
                 {to.statistics.inverse, plan.x.total},
                 to.silu,
                 to.y};
  return launch(group_norm_finish<T, V>, grid_of(second, plan.batch), kStreamingThreads,
                Pipeline<T, V, kFinishStages>::kBytes, stream, g, false);
}

}  // namespace

cudaError_t streaming_forward(const NormInput& plan, const StreamingTiling& tiling,
                              const DeviceLimits& limits, int vector, const ForwardOutputs& to,
                              cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = 16 / sizeof(T);
    return vector > 1 ? launch_forward<T, kVector>(plan, tiling, limits, to, stream)
                      : launch_forward<T, 1>(plan, tiling, limits, to, stream);
  });
}

}  // namespace jaxunet::cuda
