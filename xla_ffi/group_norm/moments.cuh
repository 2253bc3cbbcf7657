// Reduction to statistics in blocks whose threads hold their numbers in registers
// (block_reduction.h), for statistics.cu and forward_register_resident.cu. forward_smem_resident.cu
// uses only merge_neighbours.
//
// A set of numbers is described by its *moments*: count, mean, and m2, the sum of squared
// differences from the mean. The mean of a union is the weighted mean of its sets; its m2 is the
// sum of their m2 plus the squared distances of their means from the new mean, weighted by their
// counts (Chan, Golub & LeVeque 1979). This never subtracts large numbers. Counts follow from the
// tiling, so only float2 {mean, m2} are kept.
//
// The levels: accumulators of a thread -> pieces of its vector (merge_neighbours) -> entries [row]
// [piece] in shared memory (write_entries) -> groups of the block, one team of lanes per group
// (merge_group) -> groups of the cluster (merge_ranks).
#pragma once

#include "block_reduction.h"
#include "launch.h"
#include "mailbox.cuh"
#include "vector.cuh"

namespace jaxunet::cuda {

// Counts the pixels of a block's rows. The rows of all blocks that share an image take its pixels
// in turns: row r has pixels r, r + stride, ..., where stride is the number of rows in all of these
// blocks.
struct RowPixels {
  int each, rest;  // pixels / stride, pixels % stride
  int first;       // number of the block's row 0 among all of these rows

  __device__ int of(int row) const { return each + (first + row < rest ? 1 : 0); }
  __device__ int of_block(int rows) const { return each * rows + max(min(rest - first, rows), 0); }
};

// A thread's place in its block.
struct BlockThread {
  int row, column;
  bool present;  // false: the thread idles

  __device__ explicit BlockThread(const BlockReduction& block) {
    row = block.by_vectors.quotient(static_cast<int>(threadIdx.x));
    column = static_cast<int>(threadIdx.x) - row * block.vectors;
    present = row < block.rows;
  }
};

// Merges the accumulators of each piece into the piece's first one. Each accumulator has kWidth
// adjacent channels and `count` numbers.
template <int kWidth, int A>
__device__ void merge_neighbours(int piece_bits, float count, float (&mean)[A], float (&m2)[A]) {
#pragma unroll
  for (int width = 1; width < A; width *= 2) {
    if (width * kWidth >= 1 << piece_bits) break;
#pragma unroll
    for (int j = 0; j < A; j += 2 * width) {
      const float delta = mean[j + width] - mean[j];
      mean[j] += 0.5f * delta;
      m2[j] += m2[j + width] + 0.5f * static_cast<float>(width) * count * delta * delta;
    }
  }
}

// Writes the moments of a thread's pieces to their entries. `mean`, `m2`: the thread's
// accumulators, with kWidth adjacent channels and `count` numbers each; overwritten.
template <int kWidth, int A>
__device__ void write_entries(const BlockReduction& block, const BlockThread& thread, float count,
                              float (&mean)[A], float (&m2)[A], float2* entries) {
  merge_neighbours<kWidth>(block.piece_bits, count, mean, m2);
  float2* const thread_entries =
      entries + thread.row * block.row_entries + ((thread.column * A * kWidth) >> block.piece_bits);
#pragma unroll
  for (int j = 0; j < A; ++j) {
    if (thread.present && (j * kWidth & ((1 << block.piece_bits) - 1)) == 0)
      thread_entries[(j * kWidth) >> block.piece_bits] = make_float2(mean[j], m2[j]);
  }
}

// A lane's place in its team. Team i merges groups i, i + teams, ...
struct Team {
  int index, member, size, teams;

  __device__ explicit Team(const BlockReduction& block) {
    size = 1 << block.team_bits;
    index = static_cast<int>(threadIdx.x) >> block.team_bits;
    member = static_cast<int>(threadIdx.x) & (size - 1);
    teams = static_cast<int>(blockDim.x) >> block.team_bits;
  }
  // Returns the sum over each team's lanes to each of them. All lanes of a warp must call it.
  __device__ float sum(float x) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (step < size) x += __shfl_xor_sync(~0u, x, step);
    }
    return x;
  }
};

// Returns mean and m2 of a group of the block to all lanes of its team; zeros if the block has no
// such group. All lanes of a warp must call it. `total`: how many numbers of the group this block
// has.
__device__ inline float2 merge_group(const BlockReduction& block, const Team& team,
                                     const RowPixels& pixels, int group, float total,
                                     const float2* entries) {
  const int pieces = block.group >> block.piece_bits;
  const float2* const group_entries = entries + group * pieces;
  const int start = group < block.groups ? team.member : block.rows;
  const auto width = static_cast<float>(1 << block.piece_bits);
  float sum = 0, m2 = 0;
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
#pragma unroll 4
    for (int row = start; row < block.rows; row += team.size)
      sum += group_entries[row * block.row_entries + i].x *
             (width * static_cast<float>(pixels.of(row)));
  }
  sum = team.sum(sum);
  const float mean = total > 0 ? sum / total : 0.0f;
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
#pragma unroll 4
    for (int row = start; row < block.rows; row += team.size) {
      const float2 entry = group_entries[row * block.row_entries + i];
      const float delta = entry.x - mean;
      m2 += entry.y + width * static_cast<float>(pixels.of(row)) * delta * delta;
    }
  }
  return make_float2(mean, team.sum(m2));
}

// Merges the moments that the blocks of a cluster have sent, [rank][group], into the mean and m2 of
// a group. All lanes of a warp must call it. `pixels`: of any of the blocks. `total`: how many
// numbers the group has.
__device__ inline float2 merge_ranks(const BlockReduction& block, const Team& team,
                                     const RowPixels& pixels, int ranks, int group, float total,
                                     const float2* sent) {
  const bool there = group < block.groups && team.member < ranks;
  const RowPixels theirs{pixels.each, pixels.rest, team.member * block.rows};
  const float count =
      there ? static_cast<float>(block.group) * static_cast<float>(theirs.of_block(block.rows))
            : 0.0f;
  const float2 part = there ? sent[team.member * block.groups + group] : make_float2(0, 0);
  const float mean = team.sum(count * part.x) / total, delta = part.x - mean;
  return make_float2(mean, team.sum(part.y + count * delta * delta));
}

// Merges the entries of each of the block's groups. All threads of a block must call it. The lanes
// of a group's team call take(group, moments); `here`: how many numbers of a group this block has.
template <class Take>
__device__ void merge_entries(const BlockReduction& block, const Team& team,
                              const RowPixels& pixels, float here, const float2* entries,
                              const Take& take) {
#pragma unroll 1
  for (int start = 0; start < block.groups; start += team.teams) {
    const int group = start + team.index;
    const float2 all = merge_group(block, team, pixels, group, here, entries);
    if (group < block.groups) take(group, all);
  }
}

// Waits for the moments that all blocks of a cluster send to this one, and merges those of each
// group, as merge_entries does. `total`: how many numbers a group has.
template <class Tiling, class Take>
__device__ void merge_sent(const Tiling& tiling, const Team& team, const RowPixels& pixels,
                           float total, const Mailbox& mailbox, const Take& take) {
  const BlockReduction& block = tiling.block;
  mailbox.wait_full(tiling.ranks * block.groups * static_cast<int>(sizeof(float2)));
#pragma unroll 1
  for (int start = 0; start < block.groups; start += team.teams) {
    const int group = start + team.index;
    const float2 all = merge_ranks(block, team, pixels, tiling.ranks, group, total, mailbox.slots);
    if (group < block.groups) take(group, all);
  }
}

// Starts to copy 4 bytes from global to shared memory.
__device__ inline void cp_async_4(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// The channels' operands in shared memory, copied while the loads of the pixels are in flight.
struct ChannelOperands {
  float *scale, *offset;  // [channels]; aligned to 16 bytes
  float* pivot;           // [groups]: the first number of each group, if kUsesPivot

  __device__ ChannelOperands(const BlockReduction& block, int channels, char* memory) {
    scale = reinterpret_cast<float*>(memory);
    offset = scale + channels;
    pivot = offset + channels;
  }
  // Starts the copies. They are visible to the block after cp_async_wait<0> and a barrier.
  template <class T>
  __device__ void fetch(const BlockReduction& block, int channels, const TensorParts& x, int pixels,
                        const Rows& scales, const Rows& offsets, int64_t sample,
                        int first_channel) const {
#pragma unroll 1
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
      cp_async_4(scale + c, scales.data + sample * scales.stride + first_channel + c);
      cp_async_4(offset + c, offsets.data + sample * offsets.stride + first_channel + c);
    }
    if constexpr (kUsesPivot<T>) {
#pragma unroll 1
      for (int g = threadIdx.x; g < block.groups; g += blockDim.x) {
        int stride;
        cp_async_4(pivot + g,
                   find_channel<T>(x, first_channel + g * block.group, sample, pixels, &stride));
      }
    }
    cp_async_commit();
  }
  template <class T>
  __device__ float pivot_of(int group) const {
    return kUsesPivot<T> ? pivot[group] : 0.0f;
  }
};

// Loads the pivots of a thread's accumulators, which have kWidth channels each.
template <class T, int kWidth, int A>
__device__ void load_pivots(const TensorParts& x, int channel, int group, int64_t sample,
                            int pixels, float (&pivot)[A]) {
#pragma unroll
  for (int j = 0; j < A; ++j) {
    const int first_channel = channel + j * kWidth;
    int stride;
    pivot[j] = wide(
        __ldg(find_channel<T>(x, first_channel - first_channel % group, sample, pixels, &stride)));
  }
}

}  // namespace jaxunet::cuda
