// Reduction of the forward statistics in forward_smem_resident.cu.
//
// A set of numbers is described by its *moments*, kept as float4 {count, mean, m2, unused}, m2
// being the sum of squared differences from the mean. The moments of a union are the weighted mean,
// and the sum of all m2 plus the squared distances of the means, weighted by their counts (Chan,
// Golub & LeVeque 1979): no large numbers are subtracted.
//
// The levels: channels of a thread -> pieces of neighbours in its vector (merge_neighbours) -> rows
// of pieces in shared memory -> groups of the block -> groups of the cluster (merge_groups).
#pragma once

#include "launch.h"
#include "vector.cuh"

namespace jaxunet::cuda {

// Lanes that merge the moments of one group: at least the blocks of a cluster.
constexpr int kTeam = 8;

// Sums over a team's lanes, to each of them.
__device__ inline float team_sum(float x) {
#pragma unroll
  for (int step = kTeam / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Returns the union of a team's moments; visit(take) calls take(moments) for each of this lane's,
// and is called twice.
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
    const float away = s.y - mean;
    m2 += s.z + s.x * away * away;
  });
  return make_float4(count, mean, team_sum(m2), 0);
}

// The input of a block's reduction: `rows` rows of moments, one for each piece of its `channels`;
// `ranks` blocks of the cluster.
struct ReductionShape {
  int channels, group, piece_bits, rows, ranks;
};

// The block's scratch memory, in this order.
struct StatisticsScratch {
  float4* partial;                // [rows][pieces]: moments
  float4* groups;                 // [groups]: moments of the block's share, for the cluster to read
  float *scale, *offset, *pivot;  // [channels]; in the end y = (x - pivot) * scale + offset
  float *mean, *inverse;          // [groups]; mean: less the pivot

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

// Merges the channels of each piece of a vector, all of the same count, into the piece's first
// channel.
template <int V>
__device__ void merge_neighbours(int piece_bits, float count, float (&mean)[V], float (&m2)[V]) {
#pragma unroll
  for (int width = 1; width < V; width *= 2) {
    if (width >= 1 << piece_bits) break;
#pragma unroll
    for (int j = 0; j < V; j += 2 * width) {
      const float away = mean[j + width] - mean[j];
      mean[j] += 0.5f * away;
      m2[j] += m2[j + width] + 0.5f * static_cast<float>(width) * count * away * away;
    }
  }
}

// Merges the rows of `partial` to the groups of the block, then of the cluster: scratch.mean and
// scratch.inverse. The caller synchronises the block before and after; with several ranks it calls
// cluster_wait before the block ends, as others read its shared memory until then.
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
  // All lanes go round as often, as the shuffles need them all.
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
// outputs from the first block of a cluster. `pivot`: whether the means are less a pivot.
__device__ inline Coefficients write_coefficients(const StatisticsOutputs& to,
                                                  const StatisticsScratch& scratch,
                                                  const ReductionShape& shape, bool pivot, int c,
                                                  int64_t channel) {
  Coefficients found;
  const float away = scratch.mean[c / shape.group];
  found.inverse = scratch.inverse[c / shape.group];
  found.mean = pivot ? scratch.pivot[c] + away : away;
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

}  // namespace jaxunet::cuda
