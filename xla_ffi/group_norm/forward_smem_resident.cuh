// The parts of forward_smem_resident.cu: a thread's vectors in global memory and their staged
// copies in shared memory; the block's scratch memory; and the reduction of moments, from the
// warps' rows to the cluster's groups.
//
// Moments (moments.cuh) are float4 {count, mean, m2, unused} here, because threads and blocks may
// have different numbers of pixels.
#pragma once

#include "forward_smem_resident_tiling.h"
#include "launch.h"
#include "moments.cuh"

namespace jaxunet::cuda {

// The work of a thread: one vector of channels, and `steps` pixels, 1 << row_bits apart.
struct ThreadTile {
  int lane, warp_row;  // lane in the warp; index among the warps with the same channels
  int local;           // first channel of the vector, counted from the block's first
  int channel, pixel;  // first channel and first pixel, counted from the sample's first
  int steps;  // pixels of the thread; 0 if it has no channels, or its pixels lie beyond the block's
              // share
  bool present;        // the vector belongs to the block
  bool first_of_warp;  // the first lane of the warp with these channels

  __device__ ThreadTile(const SmemResidentTiling& tiling, int vector) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp_row = tiling.warp_columns == 1 ? warp : warp / tiling.warp_columns;
    const int lane_column = lane & ((1 << tiling.lane_bits) - 1);
    const int column = lane_column + 32 * (warp - warp_row * tiling.warp_columns);
    local = column * vector;
    channel = static_cast<int>(blockIdx.y) * tiling.vectors * vector + local;
    present = column < tiling.vectors;
    first_of_warp = present && lane == lane_column;
    const int row = (warp_row << (5 - tiling.lane_bits)) + (lane >> tiling.lane_bits);
    const int first = static_cast<int>(blockIdx.x) * tiling.block_pixels;
    const int end = min(first + tiling.block_pixels, tiling.pixels);
    pixel = first + row;
    const bool some = present && channel < tiling.channels && pixel < end;
    steps = some ? ((end - 1 - pixel) >> tiling.row_bits) + 1 : 0;
  }
};

// A thread's vectors of one tensor in global memory: at(step).
template <class T, int V>
struct ThreadVectors {
  T* first = nullptr;
  int64_t stride = 0;  // elements from one step to the next

  __device__ ThreadVectors(const SmemResidentTiling& tiling, const ThreadTile& tile,
                           const TensorParts& from) {
    if (tile.steps == 0) return;
    int pixel_stride;
    T* const image = find_channel<T>(from, tile.channel, blockIdx.z, tiling.pixels, &pixel_stride);
    first = image + static_cast<int64_t>(tile.pixel) * pixel_stride;
    stride = static_cast<int64_t>(pixel_stride) << tiling.row_bits;
  }
  // A tensor that has all channels in one array.
  __device__ ThreadVectors(const SmemResidentTiling& tiling, const ThreadTile& tile, void* from) {
    first = static_cast<T*>(from) +
            (static_cast<int64_t>(blockIdx.z) * tiling.pixels + tile.pixel) * tiling.channels +
            tile.channel;
    stride = static_cast<int64_t>(tiling.channels) << tiling.row_bits;
  }
  __device__ Vector<T, V>* at(int step) const {
    return reinterpret_cast<Vector<T, V>*>(first + step * stride);
  }
};

// The staged copies of a tensor in shared memory: kChunkStages stages of chunk_steps vectors for
// each thread. A thread reads only what it copied itself, so cp_async_wait suffices and no barrier
// is needed.
//
// Layout: slots[stage][step of the chunk][thread].
template <class T, int V>
struct ChunkStages {
  Vector<T, V>* slots;
  int chunk_steps;

  // The slot of step i of a chunk, in the stage that the chunk takes.
  __device__ Vector<T, V>* slot(int chunk, int i) const {
    return slots + ((chunk & (kChunkStages - 1)) * chunk_steps + i) * blockDim.x + threadIdx.x;
  }
  // Starts to copy the steps of a chunk, but none beyond `steps`.
  __device__ void fetch(const ThreadVectors<T, V>& from, int chunk, int steps) const {
    const int start = chunk * chunk_steps, end = min(start + chunk_steps, steps);
#pragma unroll 1
    for (int step = start; step < end; ++step) {
      if constexpr (V * sizeof(T) == 16) {
        cp_async_16(slot(chunk, step - start), from.at(step));
      } else {
        *slot(chunk, step - start) = *from.at(step);
      }
    }
  }
};

// Lanes that merge the moments of one group: at least as many as a cluster has blocks.
constexpr int kTeam = 8;

// Returns the sum over a team's lanes to each of them.
__device__ inline float team_sum(float x) {
#pragma unroll
  for (int step = kTeam / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Returns the union of a team's moments. visit(take) calls take(moments) for each of this lane's
// moments; it is called twice.
template <class Visit>
__device__ float4 merge_team(const Visit& visit) {
  float count = 0, sum = 0, m2 = 0;
  visit([&](const float4& s) {
    count += s.x;
    sum += s.x * s.y;
  });
  count = team_sum(count);
  sum = team_sum(sum);
  const float mean = count > 0 ? sum / count : 0.0f;
  visit([&](const float4& s) {
    const float delta = s.y - mean;
    m2 += s.z + s.x * delta * delta;
  });
  return make_float4(count, mean, team_sum(m2), 0);
}

// The input of a block's reduction: `rows` rows of moments, one for each piece of the block's
// `channels`, in each of the cluster's `ranks` blocks.
struct ReductionShape {
  int channels, group, piece_bits, rows, ranks;
};

// The block's scratch memory, in this order.
struct StatisticsScratch {
  float4* partial;                // [rows][pieces]: moments
  float4* groups;                 // [groups]: moments of the block's share, for the cluster to read
  float *scale, *offset, *pivot;  // [channels]; finally y = (x - pivot) * scale + offset
  float *mean, *inverse;          // [groups]; mean: minus the pivot

  __device__ StatisticsScratch(const ReductionShape& shape, char* memory) {
    const int channels = shape.channels;
    partial = reinterpret_cast<float4*>(memory);
    groups = partial + shape.rows * (channels >> shape.piece_bits);
    scale = reinterpret_cast<float*>(groups + channels / shape.group);
    offset = scale + channels;
    pivot = offset + channels;
    mean = pivot + channels;
    inverse = mean + channels / shape.group;
  }
};

// Merges the rows of `partial` into the moments of the block's groups, then of the cluster's:
// scratch.mean and scratch.inverse. The caller synchronises the block before and after. If there
// are several ranks, it also calls cluster_wait before the block ends, because peers read the
// block's shared memory until then.
__device__ inline void merge_groups(const ReductionShape& shape, float eps,
                                    const StatisticsScratch& scratch) {
  const int groups = shape.channels / shape.group, pieces = shape.group >> shape.piece_bits;
  const int row_pieces = shape.channels >> shape.piece_bits;
  const int team = static_cast<int>(threadIdx.x) / kTeam,
            member = static_cast<int>(threadIdx.x) % kTeam;
  const int teams = static_cast<int>(blockDim.x) / kTeam;
  const auto finish = [&](int group, const float4& all) {
    scratch.mean[group] = all.y;
    scratch.inverse[group] = rsqrtf(all.z / all.x + eps);
  };
  // All lanes run the same number of iterations, because the shuffles need every lane.
#pragma unroll 1
  for (int start = 0; start < groups; start += teams) {
    const int group = start + team;
    const float4 all = merge_team([&](const auto& take) {
#pragma unroll 1
      for (int r = group < groups ? member : shape.rows; r < shape.rows; r += kTeam) {
#pragma unroll 1
        for (int i = 0; i < pieces; ++i) take(scratch.partial[r * row_pieces + group * pieces + i]);
      }
    });
    if (group >= groups || member != 0) continue;
    if (shape.ranks == 1) {
      finish(group, all);
    } else {
      scratch.groups[group] = all;
    }
  }
  if (shape.ranks == 1) return;
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int start = 0; start < groups; start += teams) {
    const int group = start + team;
    const bool there = group < groups && member < shape.ranks;
    const float4 part = there ? read_peer(scratch.groups + group, member) : make_float4(0, 0, 0, 0);
    const float4 all = merge_team([&](const auto& take) { take(part); });
    if (group < groups && member == 0) finish(group, all);
  }
  cluster_arrive();  // this thread has read its peers; the caller waits for the others
}

// The statistics of one channel, and its normalisation z = a * x + b.
struct Coefficients {
  float mean, inverse, a, b;
};

// Computes the coefficients of the block's channel c, and writes them at index `channel` of the
// outputs from the first block of a cluster. `pivot`: true if a pivot has been subtracted from the
// means.
__device__ inline Coefficients write_coefficients(const StatisticsOutputs& to,
                                                  const StatisticsScratch& scratch,
                                                  const ReductionShape& shape, bool pivot, int c,
                                                  int64_t channel) {
  Coefficients found;
  const float delta = scratch.mean[c / shape.group];
  found.inverse = scratch.inverse[c / shape.group];
  found.mean = pivot ? scratch.pivot[c] + delta : delta;
  found.a = scratch.scale[c] * found.inverse;
  found.b = scratch.offset[c] - found.mean * found.a;
  if (blockIdx.x == 0) {
    to.mean[channel] = found.mean;
    to.inverse[channel] = found.inverse;
    if (to.a) {
      to.a[channel] = found.a;
      to.b[channel] = found.b;
    }
  }
  return found;
}

inline dim3 grid_of(const SmemResidentTiling& tiling, int64_t batch) {
  return dim3(static_cast<unsigned>(tiling.cluster_size),
              static_cast<unsigned>(tiling.channel_blocks), static_cast<unsigned>(batch));
}

}  // namespace jaxunet::cuda
