// GroupNorm forward in one launch, from registers: mean and inverse = 1 / sqrt(variance + eps) of
// each group, z = scale * (x - mean) * inverse + offset, y = act(z).
//
// A block owns some channels of a sample, always whole groups, and all pixels, or the blocks of a
// cluster share the pixels (forward_register_resident_tiling.h). dispatch.cu says which calls take
// this kernel.
// - Loads: each thread loads all of its vectors, at most kPixels of 16 bytes; scale, offset and
//   pivots are copied to shared memory.
// - Moments: the mean, then m2, of each thread's numbers, from registers.
// - Reduction: each thread writes the moments of its pieces to shared memory, where a team of lanes
//   merges those of each group (moments.cuh). In a cluster, it sends them to all blocks, whose
//   teams merge those of all blocks. The team writes the group's mean and inverse, and replaces its
//   channels' scale and offset by a and b of y = act(a * (x - pivot) + b).
// - Epilogue: y from registers.
//
// With kDrops, each thread computes which of its elements are dropped (dropout.cuh) while its loads
// are in flight, which hides the time of the hash. Two registers keep one bit per element for the
// epilogue.
//
// Two __syncthreads: before the teams read the pieces, and before the threads read a and b. In a
// cluster, every block arrives at the cluster barrier when it starts, and waits there before it
// sends its moments; it then waits for those of all blocks at its mbarrier (Mailbox).
//
// Shared memory: float2 entries [row][piece], entry_bytes; ChannelOperands; in a cluster, at
// slots_at, float2 [block of the cluster][group]. The mbarrier is static shared memory.
#include "common/dispatch_dtype.cuh"
#include "dropout.cuh"
#include "launch.h"
#include "mailbox.cuh"
#include "moments.cuh"
#include "packed.cuh"

namespace jaxunet::cuda {
namespace {

struct Forward {
  RegisterResidentTiling tiling;
  TensorParts x;
  Rows scale, offset;
  float eps;
  bool silu;
  void* y;
  float *mean, *inverse;
  Dropout dropout;
};

// Computes the mean and m2 of a thread's `steps` vectors, in accumulators of kPair channels.
template <class T, int V, int kPixels>
__device__ void thread_moments(const Packed<T, V> (&x)[kPixels], int steps,
                               float (&mean)[V / kPair], float (&m2)[V / kPair]) {
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i >= steps) break;
    float value[V];
    x[i].to_floats(value);
#pragma unroll
    for (int j = 0; j < V; j += kPair) mean[j / kPair] += value[j] + value[j + 1];
  }
  const float share = steps > 0 ? 1.0f / static_cast<float>(kPair * steps) : 0.0f;
#pragma unroll
  for (int j = 0; j < V / kPair; ++j) mean[j] *= share;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i >= steps) break;
    float value[V];
    x[i].to_floats(value);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float delta = value[j] - mean[j / kPair];
      m2[j / kPair] += delta * delta;
    }
  }
}

// Writes the statistics of a group's channels, if `writes`, and replaces their scale and offset by
// a and b of y = act(a * (x - pivot) + b), scaled for silu() if that is act. `all`: mean minus the
// pivot, and m2, of the group's `total` numbers.
template <class T>
__device__ void finish_group(const Forward& f, const Team& team, int group, int first_channel,
                             int64_t sample, float2 all, float total,
                             const ChannelOperands& operands, bool writes) {
  const int size = f.tiling.block.group;
  const float mean = operands.pivot_of<T>(group) + all.x, inverse = rsqrtf(all.y / total + f.eps);
  const float unit = f.silu ? kSiluScale<T> : 1.0f;
#pragma unroll 1
  for (int c = team.member; c < size; c += team.size) {
    const int local = group * size + c;
    const int64_t channel = sample * f.tiling.channels + first_channel + local;
    if (writes) {
      f.mean[channel] = mean;
      f.inverse[channel] = inverse;
    }
    const float a = operands.scale[local] * inverse;
    operands.scale[local] = a * unit;
    operands.offset[local] = (operands.offset[local] - all.x * a) * unit;
  }
}

// Merges the moments of the block's groups and, in a cluster, of all blocks, and finishes the
// groups. `rank`: the block's rank in its cluster.
template <class T, bool kCluster>
__device__ void merge_and_write(const Forward& f, const RowPixels& pixels, int rank,
                                int first_channel, int64_t sample, const float2* entries,
                                const ChannelOperands& operands, const Mailbox& mailbox) {
  const RegisterResidentTiling& tiling = f.tiling;
  const BlockReduction& block = tiling.block;
  const Team team(block);
  const auto size = static_cast<float>(block.group),
             total = size * static_cast<float>(tiling.pixels);
  const float here = kCluster ? size * static_cast<float>(pixels.of_block(block.rows)) : total;
  const auto finish = [&](int group, float2 all) {
    finish_group<T>(f, team, group, first_channel, sample, all, total, operands, rank == 0);
  };
  if constexpr (kCluster) {
    mailbox.wait_open();
    static_assert(kPortableCluster <= 8);  // a team has at least 8 lanes, one for each block
    merge_entries(block, team, pixels, here, entries, [&](int group, float2 all) {
      if (team.member < tiling.ranks) mailbox.send(team.member, rank * block.groups + group, all);
    });
    merge_sent(tiling, team, pixels, total, mailbox, finish);
  } else {
    merge_entries(block, team, pixels, here, entries, finish);
  }
}

// Returns which elements of a thread's `steps` vectors are dropped: bit i * V + j for channel j of
// vector i.
template <class T, int V, bool kDrops>
__device__ uint64_t dropped_bits(const Forward& f, const SampleDropout<T, V, kDrops>& dropout,
                                 int first_pixel, int channel, int steps) {
  uint64_t found = 0;
  if constexpr (kDrops) {
    const int stride = f.tiling.stride, channels = f.tiling.channels;
#pragma unroll 1
    for (int i = steps - 1; i >= 0; --i)
      found =
          found << V | dropout.bits(dropout.position(first_pixel + i * stride, channels, channel));
  }
  return found;
}

// Writes y = act(z) of a thread's `steps` vectors. `channel`: the first one of the vectors.
// `dropped`: their dropped_bits().
template <class T, int V, int kPixels, bool kDrops>
__device__ void write_y(const Forward& f, const BlockThread& thread,
                        const ChannelOperands& operands, int64_t sample, int first_pixel,
                        int channel, int steps, const Packed<T, V> (&x)[kPixels],
                        const SampleDropout<T, V, kDrops>& dropout, uint64_t dropped) {
  const RegisterResidentTiling& tiling = f.tiling;
  float scale[V], offset[V];
  load_floats(operands.scale + thread.column * V, scale);
  load_floats(operands.offset + thread.column * V, offset);
  T* const to =
      static_cast<T*>(f.y) + (sample * tiling.pixels + first_pixel) * tiling.channels + channel;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i >= steps) break;
    float value[V];
    x[i].to_floats(value);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = value[j] * scale[j] + offset[j];
      value[j] = kDrops || f.silu ? silu<T>(z) : z;
    }
    dropout.drop(static_cast<uint32_t>(dropped >> (i * V)), value);
    Packed<T, V> out;
    out.from_floats(value);
    dropout.scale(reinterpret_cast<T*>(out.words));
    out.store(to + static_cast<int64_t>(i) * tiling.stride * tiling.channels);
  }
}

// kCluster: the blocks of a cluster share the pixels; a constant, so that calls without clusters do
// not pay for it.
template <class T, int V, int kPixels, bool kDrops, bool kCluster>
__global__ void __launch_bounds__(kRegisterResidentThreads, 2)
    group_norm_forward_in_registers(const __grid_constant__ Forward f) {
  const RegisterResidentTiling& tiling = f.tiling;
  const BlockReduction& block = tiling.block;
  const BlockThread thread(block);
  const int64_t sample = blockIdx.z;
  const int rank = kCluster ? static_cast<int>(blockIdx.x) : 0;
  const int block_channels = block.vectors * V,
            first_channel = static_cast<int>(blockIdx.y) * block_channels;
  const int channel = first_channel + thread.column * V;
  const RowPixels pixels{tiling.each, tiling.rest, rank * block.rows};
  const int steps = thread.present ? pixels.of(thread.row) : 0,
            first_pixel = pixels.first + thread.row;
  __shared__ Barrier full;
  const Mailbox mailbox{&full, reinterpret_cast<float2*>(dynamic_smem() + tiling.slots_at)};
  if constexpr (kCluster) mailbox.open(true);

  // Loads.
  const SampleDropout<T, V, kDrops> dropout(f.dropout, sample);  // its words load before the pixels
  Packed<T, V> x[kPixels];
  int stride;
  const T* from = find_channel<T>(f.x, channel, sample, tiling.pixels, &stride);
  from += static_cast<int64_t>(first_pixel) * stride;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i < steps) x[i].load(from + static_cast<int64_t>(i) * tiling.stride * stride);
  }
  auto* const entries = reinterpret_cast<float2*>(dynamic_smem());
  const ChannelOperands operands(block, block_channels, dynamic_smem() + tiling.entry_bytes);
  operands.fetch<T>(block, block_channels, f.x, tiling.pixels, f.scale, f.offset, sample,
                    first_channel);
  static_assert(!kDrops || kPixels * V <= 64, "a bit an element");
  const uint64_t dropped = dropped_bits(f, dropout, first_pixel, channel, steps);

  // Moments.
  if constexpr (kUsesPivot<T>) {
    float pivot[V / kPair];
    load_pivots<T, kPair>(f.x, channel, block.group, sample, tiling.pixels, pivot);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      float value[V];
      x[i].to_floats(value);
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] -= pivot[j / kPair];
      x[i].from_floats(value);
    }
  }
  {
    float mean[V / kPair] = {}, m2[V / kPair] = {};
    thread_moments(x, steps, mean, m2);
    write_entries<kPair>(block, thread, static_cast<float>(kPair * steps), mean, m2, entries);
  }

  // Reduction.
  cp_async_wait<0>();
  __syncthreads();
  merge_and_write<T, kCluster>(f, pixels, rank, first_channel, sample, entries, operands, mailbox);
  __syncthreads();

  // Epilogue.
  if (steps == 0) return;
  write_y(f, thread, operands, sample, first_pixel, channel, steps, x, dropout, dropped);
}

template <class T, bool kDrops>
cudaError_t launch_forward(const NormInput& plan, const RegisterResidentTiling& tiling,
                           const ForwardOutputs& to, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  const Forward f{tiling,
                  tensor_parts(plan.x),
                  plan.scale,
                  plan.offset,
                  plan.eps,
                  to.silu,
                  to.y,
                  to.statistics.mean,
                  to.statistics.inverse,
                  to.dropout};
  const auto kernel =
      tiling.ranks > 1            ? group_norm_forward_in_registers<T, kVector, 8, kDrops, true>
      : tiling.thread_pixels <= 2 ? group_norm_forward_in_registers<T, kVector, 2, kDrops, false>
      : tiling.thread_pixels <= 4 ? group_norm_forward_in_registers<T, kVector, 4, kDrops, false>
                                  : group_norm_forward_in_registers<T, kVector, 8, kDrops, false>;
  const dim3 grid(static_cast<unsigned>(tiling.ranks), static_cast<unsigned>(tiling.channel_blocks),
                  static_cast<unsigned>(plan.batch));
  return launch_row_clusters(kernel, grid, threads_of(tiling.block), tiling.smem_bytes, stream, f);
}

}  // namespace

cudaError_t register_resident_forward(const NormInput& plan, const RegisterResidentTiling& tiling,
                                      const ForwardOutputs& to, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    using T = decltype(element);
    return to.dropout.seeds ? launch_forward<T, true>(plan, tiling, to, stream)
                            : launch_forward<T, false>(plan, tiling, to, stream);
  });
}

}  // namespace jaxunet::cuda
