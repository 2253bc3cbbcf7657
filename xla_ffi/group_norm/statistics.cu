// Statistics of a GroupNorm in one launch: mean and inverse = 1 / sqrt(variance + eps) of each
// group and, if requested, each channel's map z = a * x + b. A block, or a cluster of blocks, owns
// some channels of a sample (statistics_tiling.h). dispatch.cu says which calls take this kernel.
//
// - Mainloop: each thread loads batches of kBatch vectors directly into registers. The loads of one
//   batch overlap the sums of x - first and (x - first)^2 over the batch before it (ThreadSums).
// - Reduction: the moments of a thread's pieces go to shared memory, where a team of lanes merges
//   those of each group (moments.cuh). The blocks of a cluster send their groups' moments to block
//   0, whose teams merge them. The teams write the results.
//
//     global memory            registers                   shared memory
//
//     x  ------------------->  two batches -> ThreadSums
//                              moments of pieces  ------>  entries [row][piece]
//                              moments of groups  <------    (teams)
//                                |
//                                +-- no cluster: teams
//                                |   write the results
//                                +-- cluster: st.async  ->  slots of block 0
//                              moments of groups  <------    (teams of block 0)
//     mean, inverse, a, b  <-  results
//
// Synchronisation:
//
//     barrier           waits                       arrives
//     __syncthreads     all threads, before the     all threads, once their entries are written
//                       teams read
//     cluster barrier   every block, before it      every block when it starts: once all have,
//                       sends                       block 0 has initialised its mbarrier
//     mbarrier `full`   block 0, before it reads    its thread 0, once it has sent (1 + the bytes
//                       the slots (parity 0)        of all moments); used once
//
// The other blocks may exit before block 0, because no block accesses their shared memory.
//
// Shared memory: float2 entries [row][piece], entry_bytes; ChannelOperands; at slots_at, float2
// [block of the cluster][group]. The mbarrier is static shared memory.
#include "common/dispatch_dtype.cuh"
#include "launch.h"
#include "mailbox.cuh"
#include "moments.cuh"
#include "packed.cuh"
#include "statistics_tiling.h"

namespace jaxunet::cuda {
namespace {

struct Statistics {
  StatisticsTiling tiling;
  TensorParts x;
  Rows scale, offset;
  float eps;
  StatisticsOutputs to;
};

// Vectors per batch: with two batches, each thread has 4 to 8 loads of 16 bytes in flight. To
// refit, time half and twice as many.
constexpr int kBatch = 4;

// A thread's vectors in global memory.
template <class T, int V>
struct VectorReader {
  const T* at;
  int stride;  // bytes from one vector to the next

  // Loads the first `count` vectors of a batch; the others do not exist.
  __device__ void load(Packed<T, V> (&to)[kBatch], int count) {
    const char* const from = reinterpret_cast<const char*>(at);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i < count)
        to[i].load(reinterpret_cast<const T*>(from + static_cast<int64_t>(stride) * i));
    }
    at = reinterpret_cast<const T*>(from + static_cast<int64_t>(stride) * kBatch);
  }
};

// Sums of x - first and (x - first)^2 of a thread's numbers, in A accumulators of kWidth channels;
// `first` is the first number of each. finish() subtracts count * (mean - first)^2 from the sum of
// squares to get m2. This loses few bits, because `first` is one of the numbers: its squared
// distance from the mean is at most m2, and typically about m2 / count.
template <class T, int V, int kWidth>
struct ThreadSums {
  static constexpr int A = V / kWidth;
  float pivot[kUsesPivot<T> ? A : 1] = {};
  float first[A] = {}, sum[A] = {}, squares[A] = {};

  __device__ float centred(float value, int j) const {
    return kUsesPivot<T> ? value - pivot[j / kWidth] : value;
  }
  __device__ void start(const Packed<T, V>& x) {
    float value[V];
    x.to_floats(value);
#pragma unroll
    for (int j = 0; j < V; j += kWidth) first[j / kWidth] = centred(value[j], j);
  }
  // Adds the first `count` vectors of a batch. A batch is summed separately and then added to the
  // total. One long running sum would round more squares of 16-bit numbers down than up, because
  // the squares of odd integers all end in the bits 001.
  __device__ void add(const Packed<T, V> (&x)[kBatch], int count) {
    float batch_sum[A] = {}, batch_squares[A] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= count) break;
      float value[V];
      x[i].to_floats(value);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float delta = centred(value[j], j) - first[j / kWidth];
        batch_sum[j / kWidth] += delta;
        batch_squares[j / kWidth] += delta * delta;
      }
    }
#pragma unroll
    for (int j = 0; j < A; ++j) {
      sum[j] += batch_sum[j];
      squares[j] += batch_squares[j];
    }
  }
  // Turns each accumulator's sums of `count` numbers into their mean, in `first`, and m2, in
  // `squares`.
  __device__ void finish(float count) {
    const float share = count > 0 ? 1.0f / count : 0.0f;
#pragma unroll
    for (int j = 0; j < A; ++j) {
      const float delta = sum[j] * share;
      squares[j] = fmaxf(squares[j] - sum[j] * delta, 0.0f);
      first[j] += delta;
    }
  }
};

// Writes the statistics of a group's channels, which the team's lanes divide. `all`: mean minus the
// pivot, and m2, of the group's `total` numbers.
template <class T>
__device__ void write_statistics(const Statistics& f, const Team& team,
                                 const ChannelOperands& operands, int group, int first_channel,
                                 int64_t sample, float2 all, float total) {
  const int size = f.tiling.block.group;
  const float mean = operands.pivot_of<T>(group) + all.x, inverse = rsqrtf(all.y / total + f.eps);
#pragma unroll 1
  for (int c = team.member; c < size; c += team.size) {
    const int local = group * size + c;
    const int64_t at = sample * f.tiling.channels + first_channel + local;
    f.to.mean[at] = mean;
    f.to.inverse[at] = inverse;
    if (f.to.a) {
      const float a = operands.scale[local] * inverse;
      f.to.a[at] = a;
      f.to.b[at] = operands.offset[local] - mean * a;
    }
  }
}

// Merges the entries of the block's groups and, in a cluster, the moments of all blocks; block 0
// writes the statistics. `rank`: the block's rank in its cluster.
template <class T>
__device__ void merge_and_write(const Statistics& f, const RowPixels& pixels, int rank,
                                int first_channel, int64_t sample, const float2* entries,
                                const ChannelOperands& operands, const Mailbox& mailbox) {
  const StatisticsTiling& tiling = f.tiling;
  const BlockReduction& block = tiling.block;
  const Team team(block);
  const auto size = static_cast<float>(block.group),
             total = size * static_cast<float>(tiling.pixels),
             here = size * static_cast<float>(pixels.of_block(block.rows));
  const auto write = [&](int group, float2 all) {
    write_statistics<T>(f, team, operands, group, first_channel, sample, all, total);
  };
  if (tiling.ranks > 1) mailbox.wait_open();
  merge_entries(block, team, pixels, here, entries, [&](int group, float2 all) {
    if (tiling.ranks == 1) {
      write(group, all);
    } else if (team.member == 0) {
      mailbox.send(0, rank * block.groups + group, all);
    }
  });
  if (tiling.ranks == 1 || rank != 0) return;
  merge_sent(tiling, team, pixels, total, mailbox, write);
}

// kWidth: channels of an accumulator, kPair or 1. A multiprocessor holds two blocks, but only one
// if each channel of a vector has its own accumulator (odd groups).
template <class T, int V, int kWidth>
__global__ void __launch_bounds__(kStatisticsThreads, kWidth == V || kWidth > 1 ? 2 : 1)
    group_norm_statistics(const __grid_constant__ Statistics f) {
  const StatisticsTiling& tiling = f.tiling;
  const BlockReduction& block = tiling.block;
  const BlockThread thread(block);
  const int64_t sample = blockIdx.z;
  const int rank = static_cast<int>(blockIdx.x), block_channels = block.vectors * V;
  const int first_channel = static_cast<int>(blockIdx.y) * block_channels,
            channel = first_channel + thread.column * V;
  const RowPixels pixels{tiling.each, tiling.rest, rank * block.rows};
  const int steps = thread.present ? pixels.of(thread.row) : 0;
  auto* const entries = reinterpret_cast<float2*>(dynamic_smem());
  const ChannelOperands operands(block, block_channels, dynamic_smem() + tiling.entry_bytes);
  __shared__ Barrier full;
  const Mailbox mailbox{&full, reinterpret_cast<float2*>(dynamic_smem() + tiling.slots_at)};
  if (tiling.ranks > 1) mailbox.open(rank == 0);

  // Mainloop.
  ThreadSums<T, V, kWidth> sums;
  {
    int stride;
    const T* const image = find_channel<T>(f.x, channel, sample, tiling.pixels, &stride);
    VectorReader<T, V> reader{image + static_cast<int64_t>(pixels.first + thread.row) * stride,
                              block.rows * tiling.ranks * stride * static_cast<int>(sizeof(T))};
    Packed<T, V> one[kBatch], other[kBatch];
    reader.load(one, steps);
    if (rank == 0)
      operands.fetch<T>(block, block_channels, f.x, tiling.pixels, f.scale, f.offset, sample,
                        first_channel);
    if constexpr (kUsesPivot<T>)
      load_pivots<T, kWidth>(f.x, channel, block.group, sample, tiling.pixels, sums.pivot);
    if (steps > 0) sums.start(one[0]);
#pragma unroll 1
    for (int left = steps; left > 0; left -= 2 * kBatch) {
      reader.load(other, left - kBatch);
      sums.add(one, left);
      reader.load(one, left - 2 * kBatch);
      sums.add(other, left - kBatch);
    }
  }

  // Reduction.
  const auto count = static_cast<float>(kWidth * steps);
  sums.finish(count);
  write_entries<kWidth>(block, thread, count, sums.first, sums.squares, entries);
  cp_async_wait<0>();
  __syncthreads();
  merge_and_write<T>(f, pixels, rank, first_channel, sample, entries, operands, mailbox);
}

template <class T>
cudaError_t launch_statistics(const NormInput& plan, const StatisticsTiling& tiling, int vector,
                              const StatisticsOutputs& to, cudaStream_t stream) {
  const Statistics f{tiling, tensor_parts(plan.x), plan.scale, plan.offset, plan.eps, to};
  constexpr int kVector = 16 / sizeof(T);
  const auto kernel = vector == 1                       ? group_norm_statistics<T, 1, 1>
                      : tiling.block.group % kPair == 0 ? group_norm_statistics<T, kVector, kPair>
                                                        : group_norm_statistics<T, kVector, 1>;
  return launch_row_clusters(
      kernel,
      dim3(static_cast<unsigned>(tiling.ranks), static_cast<unsigned>(tiling.channel_blocks),
           static_cast<unsigned>(plan.batch)),
      threads_of(tiling.block), tiling.smem_bytes, stream, f);
}

}  // namespace

cudaError_t statistics(const NormInput& plan, const StatisticsTiling& tiling, int vector,
                       const StatisticsOutputs& to, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    return launch_statistics<decltype(element)>(plan, tiling, vector, to, stream);
  });
}

}  // namespace jaxunet::cuda
