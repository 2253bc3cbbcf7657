// GroupNorm forward of large samples in two launches: statistics.cu, then group_norm_finish, which
// reads x once more and writes y = act(z), with the formula in forward_smem_resident.cu.
//
// Grid of group_norm_finish: (ranks, channel blocks, batch), no clusters (streaming_tiling.h). It
// processes samples and pixels in reverse order, because the end of x is still in the L2 cache. Its
// shared memory is only the pipeline, and it needs no barriers.
#include "common/dispatch_dtype.cuh"
#include "dropout.cuh"
#include "launch.h"
#include "streaming.cuh"

namespace jaxunet::cuda {
namespace {

// Steps in flight per block. A step is one vector per thread, 4 KiB. To refit, time the kernel with
// half and with twice as many.
constexpr int kFinishStages = 4;

struct Finish {
  StreamingTiling tiling;
  int batch;
  TensorParts x;
  Rows scale, offset, mean, inverse;
  bool silu;
  void* y;
  Dropout dropout;
};

template <class T, int V, bool kDrops>
__global__ void __launch_bounds__(kStreamingThreads, kStreamingBlocks)
    group_norm_finish(const __grid_constant__ Finish f) {
  const StreamingTiling& tiling = f.tiling;
  const int sample = f.batch - 1 - static_cast<int>(blockIdx.z);
  StreamingTile tile(tiling, V);
  tile.reverse(tiling);
  if (tile.steps == 0) return;
  const SampleDropout<T, V, kDrops> dropout(f.dropout, sample);
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
    const uint32_t dropped = dropout.bits(
        dropout.position(tile.pixel + step * tile.stride, tiling.channels, tile.channel));
    cp_async_wait<kFinishStages - 1>();
    float value[V];
    pipeline.read(step, value);
    if (step + kFinishStages < tile.steps) pipeline.fetch(step + kFinishStages);
    cp_async_commit();
    norm.centre(value);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = norm.at(value, j);
    if (kDrops || f.silu) {
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] = silu<T>(kSiluScale<T> * value[j]);
    }
    dropout.drop(dropped, value);
    Vector<T, V> out;
    out.from_floats(value);
    dropout.scale(out.values);
    *y.next() = out;
  }
}

template <class T, int V, bool kDrops>
cudaError_t launch_finish(const NormInput& plan, const StreamingTiling& tiling,
                          const ForwardOutputs& to, cudaStream_t stream) {
  const Finish f{tiling,
                 static_cast<int>(plan.batch),
                 tensor_parts(plan.x),
                 plan.scale,
                 plan.offset,
                 {to.statistics.mean, plan.x.total},
                 {to.statistics.inverse, plan.x.total},
                 to.silu,
                 to.y,
                 to.dropout};
  return launch_single_blocks(group_norm_finish<T, V, kDrops>, grid_of(tiling, plan.batch),
                              kStreamingThreads, Pipeline<T, V, kFinishStages>::kBytes, stream, f);
}

}  // namespace

cudaError_t streaming_forward(const NormInput& plan, const StatisticsTiling& first,
                              const StreamingTiling& second, int vector, const ForwardOutputs& to,
                              cudaStream_t stream) {
  const cudaError_t error = statistics(plan, first, vector, to.statistics, stream);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(plan.type, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = 16 / sizeof(T);
    if (to.dropout.seeds) return launch_finish<T, kVector, true>(plan, second, to, stream);
    return vector > 1 ? launch_finish<T, kVector, false>(plan, second, to, stream)
                      : launch_finish<T, 1, false>(plan, second, to, stream);
  });
}

}  // namespace jaxunet::cuda
