// GroupNorm backward of large samples in two launches (streaming_tiling.h).
// backward_smem_resident.cu has the formulas and the meaning of `value`.
//
// group_norm_sums adds up dz and dz * n over the pixels. Grid: (ranks, channel blocks, batch). With
// kCluster, the 8 ranks are a cluster that owns some channels of a sample, and its blocks take the
// pixels in turns. Without kCluster, a single block owns the channels, which works on any GPU.
// - Prologue: start the copies of the first kStages steps of x and dy.
// - Mainloop: wait for the oldest step, start the copy of a later one, add to the thread's sums.
// - Epilogue: reduce over the block (shared memory) and the cluster (distributed shared memory),
//   where each block writes a share of the channels.
//
// Shared memory with kCluster: the pipelines of x and dy; the sums of the block, float4 [channels];
// the sums of each row of threads, float [rows][2][channels]. Synchronisation: one __syncthreads;
// two cluster barriers, one before a block reads its peers' memory, one before a block that peers
// read may exit.
//
// Shared memory without kCluster: the pipelines, later overwritten by the sums of the rows, so that
// three blocks fit in the 100 KiB of a multiprocessor of compute capability 8.6 or 8.9.
// Synchronisation: one __syncthreads after all threads have read their last step, one after they
// have written the sums.
//
// group_norm_dx reads x and dy once more and writes dx, and act(z) if requested. Grid: (ranks,
// channel blocks, reduce_layers + batch), no clusters. It processes samples and pixels in reverse
// order, because the end of x and dy is still in the L2 cache. Blocks of z < reduce_layers add up
// the gradients of scale and offset over the batch instead.
//
// Shared memory: the pipelines of x, dy and the added tensors; four floats per channel.
// Synchronisation: two __syncthreads around the computation of the groups' terms.
#include "backward_streaming.cuh"
#include "common/dispatch_dtype.cuh"

namespace jaxunet::cuda {
namespace {

// Adds up entry i of the [2][channels] sums of the block's rows.
__device__ inline float sum_of_rows(const StreamingTiling& tiling, int block_channels,
                                    const float* partial, int i) {
  float total = 0;
#pragma unroll 4
  for (int row = 0; row < tiling.rows; ++row) total += partial[2 * row * block_channels + i];
  return total;
}

// Adds up the sums of the block's rows and writes the totals; for a block that has all pixels of
// its channels. The caller synchronises the block beforehand.
__device__ inline void write_sums(const Gradient& g, int first_channel, int block_channels,
                                  const float* partial) {
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * block_channels; i += kStreamingThreads) {
    const bool second = i >= block_channels;
    const int channel = first_channel + (second ? i - block_channels : i);
    float total = sum_of_rows(g.tiling, block_channels, partial, i);
    if (second) total *= *channel_entry(g.operands.inverse, blockIdx.z, channel);
    float* const to =
        g.operands.sums + 2 * static_cast<int64_t>(blockIdx.z) * g.tiling.channels + channel;
    to[second ? g.tiling.channels : 0] = total;
  }
}

// Adds up the sums of the block's rows, then those of the cluster's blocks, and writes the totals.
// The caller synchronises the block beforehand, and the cluster before the block ends.
__device__ inline void reduce_sums(const Gradient& g, int first_channel, int block_channels,
                                   const float* partial, float4* totals) {
  const StreamingTiling& tiling = g.tiling;
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * block_channels; i += kStreamingThreads) {
    const float total = sum_of_rows(tiling, block_channels, partial, i);
    const bool second = i >= block_channels;
    float4& to = totals[second ? i - block_channels : i];
    (second ? to.y : to.x) = total;
  }
  cluster_arrive();
  cluster_wait();
  const int rank = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (int c = rank * kStreamingThreads + static_cast<int>(threadIdx.x); c < block_channels;
       c += tiling.ranks * kStreamingThreads) {
    float dz_sum = 0, product_sum = 0;
#pragma unroll 4
    for (int other = 0; other < tiling.ranks; ++other) {
      const float4 part = read_peer(totals + c, other);
      dz_sum += part.x;
      product_sum += part.y;
    }
    float* const to = g.operands.sums + 2 * static_cast<int64_t>(blockIdx.z) * tiling.channels +
                      first_channel + c;
    to[0] = dz_sum;
    to[tiling.channels] =
        product_sum * *channel_entry(g.operands.inverse, blockIdx.z, first_channel + c);
  }
}

template <class T, int V, bool kCluster, bool kDrops>
__global__ void __launch_bounds__(kStreamingThreads, kStreamingBlocks)
    group_norm_sums(const __grid_constant__ Gradient g) {
  const StreamingTiling& tiling = g.tiling;
  const int block_channels = tiling.vectors * V,
            first_channel = static_cast<int>(blockIdx.y) * block_channels;
  const StreamingTile tile(tiling, V);
  const SampleDropout<T, V, kDrops> dropout(g.dropout, blockIdx.z);
  Pipelines<T, V> pipelines(g, tile, blockIdx.z);
  float4* const totals = pipelines.scratch();  // [channels], with kCluster: .x, .y: both sums
  float* const partial =                       // [rows][2][channels]: both sums of each row
      kCluster ? reinterpret_cast<float*>(totals + block_channels)
               : reinterpret_cast<float*>(dynamic_smem());
  {
    const auto norm = affine_of<T, V>(g, tile, blockIdx.z);
    float dz_sum[V] = {}, product_sum[V] = {};  // sums of dz and of dz * value
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step) {
      float value[V], dz[V], active[V];
      pipelines.read(g, tile, dropout, step, value, dz);
      norm.centre(value);
      differentiate(norm, kDrops ? Act::kSilu : g.operands.act, value, dz, active);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dz_sum[j] += dz[j];
        product_sum[j] += dz[j] * value[j];
      }
    }
    if constexpr (!kCluster) __syncthreads();  // `partial` overwrites the pipelines
    if (tile.row < tiling.rows) {
      if constexpr (!kUsesPivot<T>) {  // from dz * x to dz * (x - mean)
        float mean[V];
        load_floats(channel_entry(g.operands.mean, blockIdx.z, tile.channel), mean);
#pragma unroll
        for (int j = 0; j < V; ++j) product_sum[j] -= mean[j] * dz_sum[j];
      }
      float* const row = partial + 2 * tile.row * block_channels + tile.local;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        row[j] = dz_sum[j];
        row[block_channels + j] = product_sum[j];
      }
    }
  }
  __syncthreads();
  if constexpr (kCluster) {
    reduce_sums(g, first_channel, block_channels, partial, totals);
    cluster_arrive();  // no block may exit while others read its memory
    cluster_wait();
  } else {
    write_sums(g, first_channel, block_channels, partial);
  }
}

template <class T, int V, bool kDrops>
cudaError_t launch_sums(const Gradient& g, int64_t batch, cudaStream_t stream) {
  const StreamingTiling& tiling = g.tiling;
  constexpr int64_t kPipelines = Pipelines<T, V>::kBytes;
  if (tiling.ranks == 1) {
    static_assert(kPipelines >= static_cast<int64_t>(2 * sizeof(float)) * kStreamingThreads * V,
                  "the sums of all rows fit the memory of the pipelines");
    return launch_row_clusters(group_norm_sums<T, V, false, kDrops>, grid_of(tiling, batch),
                               kStreamingThreads, kPipelines, stream, g);
  }
  const int64_t block_channels = static_cast<int64_t>(tiling.vectors) * V;
  const int64_t sums_bytes =
      block_channels * static_cast<int64_t>(sizeof(float4) + 2 * sizeof(float) * tiling.rows);
  return launch_row_clusters(group_norm_sums<T, V, true, kDrops>, grid_of(tiling, batch),
                             kStreamingThreads, kPipelines + sums_bytes, stream, g);
}

// kDrops: dy goes through dropout first; act(z) is not written.
template <class T, int V, int kAdded, bool kDrops = false>
__global__ void __launch_bounds__(kStreamingThreads, kStreamingBlocks)
    group_norm_dx(const __grid_constant__ Gradient g) {
  const StreamingTiling& tiling = g.tiling;
  if (static_cast<int>(blockIdx.z) < g.reduce_layers) {
    reduce_over_batch(g);
    return;
  }
  const int sample = g.parameters.batch - 1 + g.reduce_layers - static_cast<int>(blockIdx.z);
  const int block_channels = tiling.vectors * V,
            first_channel = static_cast<int>(blockIdx.y) * block_channels;
  StreamingTile tile(tiling, V);
  tile.reverse(tiling);
  const SampleDropout<T, V, kDrops> dropout(g.dropout, sample);
  Pipelines<T, V, kAdded> pipelines(g, tile, sample);

  // While the copies arrive, compute what dx subtracts for each group.
  const GroupTerms terms(reinterpret_cast<float*>(pipelines.scratch()), block_channels);
  terms.load(g, sample, first_channel, block_channels);
  const auto norm = affine_of<T, V>(g, tile, sample);
  __syncthreads();
  terms.finish<T>(tiling, block_channels);
  __syncthreads();
  if (tile.steps == 0) return;

  float constant[V], slope[V];
  load_floats(terms.constants + tile.local, constant);
  load_floats(terms.slopes + tile.local, slope);
  VectorIterator<T, V> dx(tiling, tile, g.operands.dx, sample),
      active_to(tiling, tile, g.operands.active, sample);
  dx.stride = pipelines.x.from.stride;  // already equal, unknown to the compiler: saves registers
  active_to.stride = pipelines.dy.from.stride;
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    float value[V], dz[V], active[V];
    pipelines.read(g, tile, dropout, step, value, dz);
    norm.centre(value);
    differentiate(norm, kDrops ? Act::kSilu : g.operands.act, value, dz, active);
    Vector<T, V> out;
    if (!kDrops && g.operands.active) {
      out.from_floats(active);
      *active_to.next() = out;
    }
#pragma unroll
    for (int j = 0; j < V; ++j)
      value[j] = norm.factor[j] * dz[j] - (constant[j] + value[j] * slope[j]);
    pipelines.add(tile, step, value);
    out.from_floats(value);
    *dx.next() = out;
  }
}

template <class T, int V, int kAdded, bool kDrops = false>
cudaError_t launch_dx(const Gradient& g, int64_t layers, cudaStream_t stream) {
  const int64_t block_channels = static_cast<int64_t>(g.tiling.vectors) * V;
  const int64_t smem_bytes =
      Pipelines<T, V, kAdded>::kBytes + 4 * block_channels * static_cast<int64_t>(sizeof(float));
  return launch_single_blocks(group_norm_dx<T, V, kAdded, kDrops>, grid_of(g.tiling, layers),
                              kStreamingThreads, smem_bytes, stream, g);
}

template <class T, int V, bool kDrops>
cudaError_t launch_backward(const NormGradient& plan, const StreamingTiling& tiling,
                            const DeviceLimits& limits, cudaStream_t stream) {
  Gradient g{tiling, operands_of(plan), parameter_gradients_of(plan),
             plan.parameter_gradients ? 1 : 0, plan.dropout};
  const cudaError_t error = launch_sums<T, V, kDrops>(g, plan.batch, stream);
  if (error != cudaSuccess) return error;
  const int64_t layers = plan.batch + g.reduce_layers;
  g.tiling = second_pass_tiling(tiling, limits, layers);
  if constexpr (kDrops) return launch_dx<T, V, 0, true>(g, layers, stream);
  return with_added_count(plan.added_count,
                          [&](auto count) { return launch_dx<T, V, count>(g, layers, stream); });
}

}  // namespace

cudaError_t streaming_gradient(const NormGradient& plan, const StreamingTiling& tiling,
                               const DeviceLimits& limits, int vector, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = 16 / sizeof(T);
    if (plan.dropout.seeds) return launch_backward<T, kVector, true>(plan, tiling, limits, stream);
    return vector > 1 ? launch_backward<T, kVector, false>(plan, tiling, limits, stream)
                      : launch_backward<T, 1, false>(plan, tiling, limits, stream);
  });
}

}  // namespace jaxunet::cuda
