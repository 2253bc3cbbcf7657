// From means and deviations of some numbers to those of a group: what the forward kernels share.
#pragma once

#include "block.cuh"

namespace jaxunet::cuda {

// Samples are kept as float4: count, mean, sum of squared deviations from it. Their union (Chan, Golub & LeVeque 1979)
// has the weighted mean, and the deviations besides those of the means.

constexpr int kTeam = 8;  // lanes that join a group's samples; at least a cluster's blocks

__device__ inline float sum_of_team(float x) {
#pragma unroll
  for (int step = kTeam / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The union of a team's samples: visit(take) calls take(sample) for each of this lane's.
template <class Visit>
__device__ float4 join(const Visit& visit) {
  float count = 0, sum = 0, deviation = 0;
  visit([&](const float4& s) {
    count += s.x;
    sum += s.x * s.y;
  });
  count = sum_of_team(count);
  sum = sum_of_team(sum);
  const float mean = count > 0 ? sum / count : 0.0f;
  visit([&](const float4& s) {
    const float away = s.y - mean;
    deviation += s.z + s.x * away * away;
  });
  return make_float4(count, mean, sum_of_team(deviation), 0);
}

// How a block's numbers come: rows of pieces, neighbouring channels of one group each; ranks are blocks of the cluster.
struct Cut {
  int own, group, piece_bits, rows, ranks;  // own: channels
};

// The block's scratch memory.
struct Scratch {
  float4 *partial, *groups;       // samples of pieces, rows of them; of groups, for the cluster to read
  float *scale, *offset, *pivot;  // of channels; in the end a channel's y = (x - pivot) * scale + offset
  float *mean, *inverse;          // of groups

  __device__ Scratch(const Cut& cut, char* memory) {
    const int own = cut.own;
    partial = reinterpret_cast<float4*>(memory);
    groups = partial + cut.rows * (own >> cut.piece_bits);
    scale = reinterpret_cast<float*>(groups + own / cut.group);
    offset = scale + own;
    pivot = offset + own;
    mean = pivot + own;
    inverse = mean + own / cut.group;
  }
};
// Neighbours of one piece, which have the same count; the first takes all.
template <int V>
__device__ void join_neighbours(int piece_bits, float count, float (&mean)[V], float (&deviation)[V]) {
#pragma unroll
  for (int width = 1; width < V; width *= 2) {
    if (width >= 1 << piece_bits) break;
#pragma unroll
    for (int j = 0; j < V; j += 2 * width) {
      const float away = mean[j + width] - mean[j];
      mean[j] += 0.5f * away;
      deviation[j] += deviation[j + width] + 0.5f * static_cast<float>(width) * count * away * away;
    }
  }
}

// From rows of pieces to groups of the block, then of the cluster: their mean and inverse deviation.
__device__ inline void join_groups(const Cut& cut, float eps, const Scratch& scratch) {
  const int groups = cut.own / cut.group, pieces = cut.group >> cut.piece_bits, row = cut.own >> cut.piece_bits;
  const int team = static_cast<int>(threadIdx.x) / kTeam, member = static_cast<int>(threadIdx.x) % kTeam;
  const int teams = static_cast<int>(blockDim.x) / kTeam;
  const auto finish = [&](int group, const float4& all) {
    scratch.mean[group] = all.y;
    scratch.inverse[group] = rsqrtf(all.z / all.x + eps);
  };
  // All lanes go round as often, for the sake of the shuffles.
#pragma unroll 1
  for (int start = 0; start < groups; start += teams) {
    const int group = start + team;
    const float4 all = join([&](const auto& take) {
#pragma unroll 1
      for (int r = group < groups ? member : cut.rows; r < cut.rows; r += kTeam) {
#pragma unroll 1
        for (int i = 0; i < pieces; ++i) take(scratch.partial[r * row + group * pieces + i]);
      }
    });
    if (group >= groups || member != 0) continue;
    if (cut.ranks == 1) {
      finish(group, all);
    } else {
      scratch.groups[group] = all;
    }
  }
  if (cut.ranks == 1) return;
  arrive_cluster();
  wait_cluster();
#pragma unroll 1
  for (int start = 0; start < groups; start += teams) {
    const int group = start + team;
    const bool there = group < groups && member < cut.ranks;
    const float4 part = there ? of_block(scratch.groups + group, member) : make_float4(0, 0, 0, 0);
    const float4 all = join([&](const auto& take) { take(part); });
    if (group < groups && member == 0) finish(group, all);
  }
  arrive_cluster();  // has read; whoever ends waits for it
}

// The same normalisation as a · x + b; nobody but the first block of a cluster writes it.
struct Results {
  float *a, *b, *mean, *inverse;  // a, b: null where y is written
};

struct Coefficients {
  float mean, inverse, a, b;
};

// Of the block's channel c, which is `channel` of `channels` of a sample.
__device__ inline Coefficients finish(const Results& to, const Scratch& scratch, const Cut& cut, bool pivot, int c,
                                      int64_t channel) {
  Coefficients found;
  const float away = scratch.mean[c / cut.group];
  found.inverse = scratch.inverse[c / cut.group];
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
