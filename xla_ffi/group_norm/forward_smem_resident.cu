// GroupNorm forward in one launch: mean and inverse = 1 / sqrt(variance + eps) of each group,
//   z = scale * (x - mean) * inverse + offset,
// and y = act(z) if requested. For calls that no other kernel accepts (dispatch.cu).
//
// A block owns some channels of a sample, always whole groups, and all pixels, or the blocks of a
// cluster share the pixels (forward_smem_resident_tiling.h).
// - Prologue: start to copy the first kChunkStages chunks of x to shared memory; load scale, offset
//   and pivots.
// - Mainloop: chunk by chunk, update each thread's mean and m2; copy a later chunk into the stage
//   that became free.
// - Reduction: thread, warp (shuffles), block (shared memory), cluster (distributed shared memory).
// - Epilogue: write the statistics; then, from the last chunk backwards, y from the staged copies.
//   Chunks that are no longer in shared memory are copied again.
//
// Shared memory: stage_bytes of staged chunks, [stage][step][thread] vectors of 16 bytes, then
// StatisticsScratch.
//
// Synchronisation: a thread reads only its own staged copies, so cp_async_wait suffices.
// __syncthreads separates the levels of the reduction. merge_groups arrives at the cluster barrier
// a second time after this block has read its peers; the kernel waits at that barrier at the end,
// so that no block exits while others read its shared memory.
#include "common/dispatch_dtype.cuh"
#include "dropout.cuh"
#include "forward_smem_resident.cuh"
#include "launch.h"

namespace jaxunet::cuda {
namespace {

struct Forward {
  SmemResidentTiling tiling;
  TensorParts x;
  Rows scale, offset;
  float eps;
  bool silu;
  void* y;  // null: statistics only
  StatisticsOutputs to;
  Dropout dropout;
};

// Reduces a thread's pixels to the mean and m2 of each of its channels. Each chunk takes two passes
// over shared memory, for its mean and then its m2, and is then merged with the chunks before it.
template <class T, int V>
__device__ void reduce_thread(const SmemResidentTiling& tiling, const ThreadTile& tile,
                              const ThreadVectors<T, V>& x, const ChunkStages<T, V>& stages,
                              const float (&pivot)[V], float (&mean)[V], float (&m2)[V]) {
  float seen = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < tiling.chunks; ++chunk) {
    cp_async_wait<kChunkStages - 1>();
    const int count = min(tile.steps - chunk * tiling.chunk_steps, tiling.chunk_steps);
    if (count > 0) {
      const auto fresh = static_cast<float>(count);
      float chunk_mean[V] = {}, chunk_m2[V] = {};
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        float value[V];
        stages.slot(chunk, i)->to_floats(value);
#pragma unroll
        for (int j = 0; j < V; ++j) chunk_mean[j] += kUsesPivot<T> ? value[j] - pivot[j] : value[j];
      }
      const float share = 1.0f / fresh;
#pragma unroll
      for (int j = 0; j < V; ++j) chunk_mean[j] *= share;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float value[V];
        stages.slot(chunk, i)->to_floats(value);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float delta = (kUsesPivot<T> ? value[j] - pivot[j] : value[j]) - chunk_mean[j];
          chunk_m2[j] += delta * delta;
        }
      }
      const float weight = fresh / (seen + fresh), both = seen * weight;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float delta = chunk_mean[j] - mean[j];
        mean[j] += delta * weight;
        m2[j] += chunk_m2[j] + delta * delta * both;
      }
      seen += fresh;
    }
    stages.fetch(x, chunk + kChunkStages, tile.steps);
    cp_async_commit();
  }
}

// Merges the lanes of a warp that have the same channels into the warp's row of `partial`, one
// entry per piece.
template <int V>
__device__ void reduce_warp(const SmemResidentTiling& tiling, const ThreadTile& tile,
                            int block_channels, float (&mean)[V], float (&m2)[V], float4* partial) {
  const auto count = static_cast<float>(tile.steps);
  merge_neighbours<1>(tiling.piece_bits, count, mean, m2);
  const auto first_of_piece = [&](int j) { return (j & ((1 << tiling.piece_bits) - 1)) == 0; };
  const auto size = static_cast<float>(1 << tiling.piece_bits);
  float total = count, merged_mean[V];
#pragma unroll
  for (int j = 0; j < V; ++j) merged_mean[j] = count * mean[j];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step < 1 << tiling.lane_bits) break;
    total += __shfl_xor_sync(~0u, total, step);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (first_of_piece(j)) merged_mean[j] += __shfl_xor_sync(~0u, merged_mean[j], step);
    }
  }
  const float share = total > 0 ? 1.0f / total : 0.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    merged_mean[j] *= share;
    const float delta = mean[j] - merged_mean[j];
    m2[j] += size * count * delta * delta;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step < 1 << tiling.lane_bits) break;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (first_of_piece(j)) m2[j] += __shfl_xor_sync(~0u, m2[j], step);
    }
  }
  float4* const row = partial + tile.warp_row * (block_channels >> tiling.piece_bits);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (first_of_piece(j) && tile.first_of_warp) {
      row[(tile.local + j) >> tiling.piece_bits] =
          make_float4(size * total, merged_mean[j], m2[j], 0);
    }
  }
}

// One long function: nvcc 13.0 allocates registers differently if its phases are separate
// functions.
template <class T, int V, bool kDrops>
__global__ void __launch_bounds__(kSmemResidentThreads, 2)
    group_norm_forward(const __grid_constant__ Forward f) {
  const SmemResidentTiling& tiling = f.tiling;
  const int block_channels = tiling.vectors * V,
            first_channel = static_cast<int>(blockIdx.y) * block_channels;
  const ThreadTile tile(tiling, V);
  const ThreadVectors<T, V> x(tiling, tile, f.x);
  const ChunkStages<T, V> stages{reinterpret_cast<Vector<T, V>*>(dynamic_smem()),
                                 tiling.chunk_steps};

  // Prologue.
#pragma unroll 1
  for (int chunk = 0; chunk < kChunkStages; ++chunk) {
    stages.fetch(x, chunk, tile.steps);
    cp_async_commit();
  }
  const ReductionShape shape{block_channels, tiling.group, tiling.piece_bits,
                             static_cast<int>(blockDim.x) / 32 / tiling.warp_columns,
                             tiling.cluster_size};
  const StatisticsScratch scratch(shape, dynamic_smem() + tiling.stage_bytes);
  const int present_channels = min(block_channels, tiling.channels - first_channel);
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int c = threadIdx.x; c < present_channels; c += threads) {
    scratch.scale[c] = sample_row(f.scale)[first_channel + c];
    scratch.offset[c] = sample_row(f.offset)[first_channel + c];
    if constexpr (kUsesPivot<T>) {  // the group's first number
      int stride;
      const int group_start = first_channel + c / tiling.group * tiling.group;
      scratch.pivot[c] =
          wide(*find_channel<T>(f.x, group_start, blockIdx.z, tiling.pixels, &stride));
    }
  }

  // Mainloop and reduction.
  {
    float pivot[V] = {}, mean[V] = {}, m2[V] = {};
    if constexpr (kUsesPivot<T>) {
      __syncthreads();
      if (tile.steps > 0) load_floats(scratch.pivot + tile.local, pivot);
    }
    reduce_thread(tiling, tile, x, stages, pivot, mean, m2);
    reduce_warp(tiling, tile, block_channels, mean, m2, scratch.partial);
  }
  __syncthreads();
  merge_groups(shape, f.eps, scratch);
  __syncthreads();

  // Epilogue.
#pragma unroll 1
  for (int c = threadIdx.x; c < present_channels; c += threads) {
    const auto [mean, inverse, a, b] =
        write_coefficients(f.to, scratch, shape, kUsesPivot<T>, c,
                           static_cast<int64_t>(blockIdx.z) * tiling.channels + first_channel + c);
    scratch.scale[c] = a;
    if constexpr (kUsesPivot<T>) {
      scratch.pivot[c] = mean;
    } else {
      scratch.offset[c] = b;
    }
  }
  if (f.y) {
    __syncthreads();
    float pivot[V] = {}, scale[V] = {}, offset[V] = {};
    if (tile.steps > 0) {
      load_floats(scratch.scale + tile.local, scale);
      load_floats(scratch.offset + tile.local, offset);
      if constexpr (kUsesPivot<T>) load_floats(scratch.pivot + tile.local, pivot);
    }
    const ThreadVectors<T, V> y(tiling, tile, f.y);
    const SampleDropout<T, V, kDrops> dropout(f.dropout, blockIdx.z);
    constexpr int kUnroll = kDrops ? 1 : 2;  // with the hash, two steps need too many registers
#pragma unroll 1
    for (int chunk = tiling.chunks - 1; chunk >= 0; --chunk) {
      cp_async_wait<kChunkStages - 1>();
      const int start = chunk * tiling.chunk_steps,
                count = min(tile.steps - start, tiling.chunk_steps);
#pragma unroll kUnroll
      for (int i = 0; i < count; ++i) {
        const uint32_t dropped = dropout.bits(dropout.position(
            tile.pixel + ((start + i) << tiling.row_bits), tiling.channels, tile.channel));
        float value[V];
        stages.slot(chunk, i)->to_floats(value);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float z = (kUsesPivot<T> ? value[j] - pivot[j] : value[j]) * scale[j] + offset[j];
          value[j] = kDrops || f.silu ? silu<T>(kSiluScale<T> * z) : z;
        }
        dropout.drop(dropped, value);
        Vector<T, V> out;
        out.from_floats(value);
        dropout.scale(out.values);
        *y.at(start + i) = out;
      }
      if (chunk >= kChunkStages) stages.fetch(x, chunk - kChunkStages, tile.steps);
      cp_async_commit();
    }
  }
  if (tiling.cluster_size > 1) cluster_wait();
}

template <class T>
cudaError_t launch_forward(const NormInput& plan, const DeviceLimits& limits, int vector,
                           const ForwardOutputs& to, cudaStream_t stream) {
  const SmemResidentTiling tiling =
      smem_resident_tiling(limits, to.y != nullptr, plan.batch, plan.pixels, plan.x.total,
                           plan.x.total / plan.groups, vector, sizeof(T));
  check(tiling, limits);
  const Forward f{tiling, tensor_parts(plan.x), plan.scale, plan.offset, plan.eps, to.silu,
                  to.y,   to.statistics,        to.dropout};
  constexpr int kVector = 16 / sizeof(T);
  const auto kernel = to.dropout.seeds ? group_norm_forward<T, kVector, true>
                      : vector > 1     ? group_norm_forward<T, kVector, false>
                                       : group_norm_forward<T, 1, false>;
  return launch_row_clusters(kernel, grid_of(tiling, plan.batch), tiling.threads,
                             tiling.stage_bytes + tiling.scratch_bytes, stream, f);
}

}  // namespace

cudaError_t smem_resident_forward(const NormInput& plan, const DeviceLimits& limits, int vector,
                                  const ForwardOutputs& to, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    return launch_forward<decltype(element)>(plan, limits, vector, to, stream);
  });
}

}  // namespace jaxunet::cuda
