// GroupNorm backward in one launch, all gradients but those of scale and offset:
//   n = (x - mean) * inverse,   z = scale * n + offset,   dz = dy * act'(z),
//   sums = (sum of dz, sum of dz * n) over the pixels, for each channel,
//   dx = inverse * (scale * dz - (S0 + n * S1) / N) + added,
// where S0 and S1 are the sums over the group of scale * dz and of scale * dz * n, and N its
// elements. parameter_gradients.cu adds `sums` over the batch. Large images take
// backward_streaming.cu instead.
//
// A block owns some channels of a sample, whole groups, and all pixels or a cluster's share of them
// (smem_resident.h).
// - Prologue: start to copy the first kChunkStages chunks of x and dy to shared memory; load the
//   channels' scale, offset, mean and inverse.
// - Mainloop: chunk by chunk, add up dz and dz * (x - mean) of the thread's channels; copy a later
//   chunk into the stage that became free; write act(z) where it is wanted.
// - Reduction: thread, warp (fold), block (shared memory), cluster (distributed shared memory),
//   group.
// - Epilogue: from the last chunk backwards, dx from the staged copies. Chunks that left shared
//   memory are copied once more.
//
// Shared memory: stage_bytes of staged chunks, the first half x, the second half dy, each
// [stage][step][thread] vectors of 16 bytes; then Scratch.
//
// Synchronisation: staged copies need none beyond cp_async_wait; __syncthreads separates the levels
// of the reduction. A cluster arrives when its sums are written and waits before it reads those of
// its peers; it arrives again when it has read them and waits at the end, so that no block leaves
// while others read its shared memory.
#include "common/dispatch_dtype.cuh"
#include "gradient.cuh"
#include "launch.h"
#include "smem_resident.cuh"

namespace jaxunet::cuda {
namespace {

struct Backward {
  SmemResidentTiling tiling;
  GradientOperands of;
};

// The block's scratch memory, in this order; [channels] each, but for `partial`.
struct Scratch {
  float4* sums;  // x: sum of dz, y: of dz * (x - mean), over the block's pixels, for the cluster to
                 // read
  float *scale, *offset, *mean, *inverse;
  float *constant, *slope;  // scale times the sums of dz and of dz * n over all pixels
  float *group_constant,
      *group_slope;  // what the group subtracts in dx: group_constant + (x - mean) * group_slope
  float* partial;    // [rows of warps][2][channels]: both sums of a row of warps

  __device__ Scratch(int channels, char* memory) {
    sums = reinterpret_cast<float4*>(memory);
    scale = reinterpret_cast<float*>(sums + channels);
    offset = scale + channels;
    mean = offset + channels;
    inverse = mean + channels;
    constant = inverse + channels;
    slope = constant + channels;
    group_constant = slope + channels;
    group_slope = group_constant + channels;
    partial = group_slope + channels;
  }
};

// Scratch bytes of a channel: two floats in each row of warps; once a float4 and eight floats.
constexpr KernelNeeds kNeeds{2, 256, 2 * sizeof(float), sizeof(float4) + 8 * sizeof(float)};

// Sums values[0, kHave) over the lanes of a warp that have the same channels. In each step two
// lanes exchange halves of what they have, so that in the end each lane holds the sums of some
// values only: *kept of them, those from *base on, or none where another lane has the same.
template <int kStep, int kHave, int N>
__device__ void fold(float (&values)[N], const ThreadTile& tile, int lane_bits, int* base,
                     int* kept) {
  if constexpr (kStep > 0) {
    if (kStep < 1 << lane_bits) return;
    const bool upper = (tile.lane & kStep) != 0;
    if constexpr (kHave > 1) {
      constexpr int kHalf = kHave / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float given = upper ? values[i] : values[i + kHalf],
                    mine = upper ? values[i + kHalf] : values[i];
        values[i] = mine + __shfl_xor_sync(~0u, given, kStep);
      }
      if (upper) *base += kHalf;
      *kept = kHalf;
      fold<kStep / 2, kHalf>(values, tile, lane_bits, base, kept);
    } else {
      values[0] += __shfl_xor_sync(~0u, values[0], kStep);
      if (upper) *kept = 0;
      fold<kStep / 2, 1>(values, tile, lane_bits, base, kept);
    }
  }
}

// kAdded: tensors that are added to dx.
// One function on purpose: cut into functions, its phases get other registers in nvcc 13.0.
template <class T, int V, int kAdded>
__global__ void __launch_bounds__(kSmemResidentThreads, 1)
    group_norm_backward(const __grid_constant__ Backward g) {
  const SmemResidentTiling& tiling = g.tiling;
  // Channels of the block, and the first of them.
  const int own = tiling.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const ThreadTile tile(tiling, V);
  const ThreadVectors<T, V> x(tiling, tile, g.of.x), dy(tiling, tile, g.of.dy);
  const ChunkStages<T, V> x_stages{reinterpret_cast<Vector<T, V>*>(dynamic_smem()),
                                   tiling.chunk_steps};
  const ChunkStages<T, V> dy_stages{
      reinterpret_cast<Vector<T, V>*>(dynamic_smem() + tiling.stage_bytes / 2), tiling.chunk_steps};
  const auto fetch = [&](int chunk) {
    x_stages.fetch(x, chunk, tile.steps);
    dy_stages.fetch(dy, chunk, tile.steps);
  };

  // Prologue.
#pragma unroll 1
  for (int chunk = 0; chunk < kChunkStages; ++chunk) {
    fetch(chunk);
    cp_async_commit();
  }
  const Scratch scratch(own, dynamic_smem() + tiling.stage_bytes);
  const int there = min(own, tiling.channels - first), threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    scratch.scale[c] = sample_row(g.of.scale)[first + c];
    scratch.offset[c] = sample_row(g.of.offset)[first + c];
    scratch.mean[c] = sample_row(g.of.mean)[first + c];
    scratch.inverse[c] = sample_row(g.of.inverse)[first + c];
  }
  __syncthreads();
  float mean[V] = {}, factor[V] = {}, offset[V] = {};  // z = (x - mean) * factor + offset
  if (tile.steps > 0) {
    float inverse[V];
    load_floats(scratch.mean + tile.local, mean);
    load_floats(scratch.inverse + tile.local, inverse);
    load_floats(scratch.scale + tile.local, factor);
    load_floats(scratch.offset + tile.local, offset);
#pragma unroll
    for (int j = 0; j < V; ++j) factor[j] *= inverse[j];
  }

  // Mainloop, and the reduction of a warp.
  const int rows = threads / 32 / tiling.warp_columns;
  {
    float sums[2 * V] = {};  // of dz, then of dz * (x - mean)
#pragma unroll 1
    for (int chunk = 0; chunk < tiling.chunks; ++chunk) {
      cp_async_wait<kChunkStages - 1>();
      const int start = chunk * tiling.chunk_steps,
                count = min(tile.steps - start, tiling.chunk_steps);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float value[V], given[V];
        x_stages.slot(chunk, i)->to_floats(value);
        dy_stages.slot(chunk, i)->to_floats(given);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float away = value[j] - mean[j];
          const float dz =
              activation_gradient<T>(given[j], away * factor[j] + offset[j], g.of.silu, &value[j]);
          sums[j] += dz;
          sums[V + j] += dz * away;
        }
        if (g.of.active) {
          Vector<T, V> active;
          active.from_floats(value);
          *ThreadVectors<T, V>(tiling, tile, g.of.active).at(start + i) = active;
        }
      }
      fetch(chunk + kChunkStages);
      cp_async_commit();
    }
    int base = 0, kept = 2 * V;
    fold<16, 2 * V>(sums, tile, tiling.lane_bits, &base, &kept);
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
      const int which = (base + i) / V;
      if (i < kept && tile.present) {
        scratch.partial[(2 * tile.warp_row + which) * own + tile.local + (base + i) % V] = sums[i];
      }
    }
  }
  // Memory idles while the block reduces: prefetch what the epilogue adds to dx first.
  const ThreadVectors<T, V> added[kMaxAdded] = {{tiling, tile, g.of.added[0]},
                                                {tiling, tile, g.of.added[1]}};
  const auto prefetch_added = [&](int chunk) {
    if constexpr (kAdded > 0) {
      const int start = chunk * tiling.chunk_steps,
                end = min(start + tiling.chunk_steps, tile.steps);
#pragma unroll 1
      for (int step = start; step < end; ++step) {
#pragma unroll
        for (int k = 0; k < kAdded; ++k) prefetch_l2(added[k].at(step));
      }
    }
  };
#pragma unroll 1
  for (int chunk = max(tiling.chunks - kChunkStages, 0); kAdded > 0 && chunk < tiling.chunks;
       ++chunk) {
    prefetch_added(chunk);
  }
  __syncthreads();

  // Reduction over the block, the cluster and the groups.
  const auto sums_of_block = [&](int c) {
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      total.x += scratch.partial[2 * r * own + c];
      total.y += scratch.partial[(2 * r + 1) * own + c];
    }
    return total;
  };
  if (tiling.cluster_size > 1) {
#pragma unroll 1
    for (int c = threadIdx.x; c < there; c += threads) scratch.sums[c] = sums_of_block(c);
    cluster_arrive();
    cluster_wait();
  }
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    float4 total = make_float4(0, 0, 0, 0);
    if (tiling.cluster_size == 1) {
      total = sums_of_block(c);
    } else {
#pragma unroll 1
      for (int rank = 0; rank < tiling.cluster_size; ++rank) {
        const float4 part = read_peer(scratch.sums + c, rank);
        total.x += part.x;
        total.y += part.y;
      }
    }
    total.y *= scratch.inverse[c];
    if (blockIdx.x == 0) {
      float* const to =
          g.of.sums + 2 * static_cast<int64_t>(blockIdx.z) * tiling.channels + first + c;
      to[0] = total.x;
      to[tiling.channels] = total.y;
    }
    scratch.constant[c] = scratch.scale[c] * total.x;
    scratch.slope[c] = scratch.scale[c] * total.y;
  }
  if (tiling.cluster_size > 1)
    cluster_arrive();  // this thread has read its peers; the wait is at the end
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += threads) {
    const int group = c / tiling.group * tiling.group;
    float constant = 0, slope = 0;
#pragma unroll 4
    for (int i = 0; i < tiling.group; ++i) {
      constant += scratch.constant[group + i];
      slope += scratch.slope[group + i];
    }
    const float inverse = scratch.inverse[c];
    const float share =
        inverse / (static_cast<float>(tiling.group) * static_cast<float>(tiling.pixels));
    scratch.group_constant[c] = constant * share;
    scratch.group_slope[c] = slope * share * inverse;
  }
  __syncthreads();

  // Epilogue: the chunks that were copied last are still in shared memory; the others are copied
  // once more.
  float constant[V] = {}, slope[V] = {};
  if (tile.steps > 0) {
    load_floats(scratch.group_constant + tile.local, constant);
    load_floats(scratch.group_slope + tile.local, slope);
  }
  const ThreadVectors<T, V> dx(tiling, tile, g.of.dx);
#pragma unroll 1
  for (int chunk = tiling.chunks - 1; chunk >= 0; --chunk) {
    cp_async_wait<kChunkStages - 1>();
    const int start = chunk * tiling.chunk_steps,
              count = min(tile.steps - start, tiling.chunk_steps);
#pragma unroll(kAdded > 0 ? 2 : 1)
    for (int i = 0; i < count; ++i) {
      Vector<T, V> others[kAdded > 0 ? kAdded : 1];
#pragma unroll
      for (int k = 0; k < kAdded; ++k) others[k] = load_read_only(added[k].at(start + i));
      float value[V], given[V];
      x_stages.slot(chunk, i)->to_floats(value);
      dy_stages.slot(chunk, i)->to_floats(given);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float away = value[j] - mean[j];
        float active;
        const float dz =
            activation_gradient<T>(given[j], away * factor[j] + offset[j], g.of.silu, &active);
        value[j] = factor[j] * dz - (constant[j] + away * slope[j]);
      }
#pragma unroll
      for (int k = 0; k < kAdded; ++k) {
        others[k].to_floats(given);
#pragma unroll
        for (int j = 0; j < V; ++j) value[j] += given[j];
      }
      Vector<T, V> out;
      out.from_floats(value);
      *dx.at(start + i) = out;
    }
    if (chunk >= kChunkStages) {
      fetch(chunk - kChunkStages);
      prefetch_added(chunk - kChunkStages);
    }
    cp_async_commit();
  }
  if (tiling.cluster_size > 1) cluster_wait();
}

template <class T>
cudaError_t launch_backward(const NormGradient& plan, const DeviceLimits& limits, int vector,
                            cudaStream_t stream) {
  const SmemResidentTiling tiling =
      smem_resident_tiling(limits, kNeeds, plan.batch, plan.pixels, plan.x.total,
                           plan.x.total / plan.groups, vector, sizeof(T));
  check(tiling, limits);
  const Backward g{tiling, operands_of(plan)};
  constexpr int kVector = 16 / sizeof(T);
  const auto kernel = with_added_count(plan.added_count, [&](auto count) {
    return vector > 1 ? group_norm_backward<T, kVector, count> : group_norm_backward<T, 1, count>;
  });
  return launch(kernel, grid_of(tiling, plan.batch), tiling.threads,
                tiling.stage_bytes + tiling.scratch_bytes, stream, g);
}

}  // namespace

cudaError_t smem_resident_gradient(const NormGradient& plan, const DeviceLimits& limits, int vector,
                                   cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    return launch_backward<decltype(element)>(plan, limits, vector, stream);
  });
}

}  // namespace jaxunet::cuda
