// What the backward kernels share: the activation's derivative, and the gradients of scale and offset.
#pragma once

#include <type_traits>

#include "block.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// dz = dy · act'(z), and act(z) itself.
template <class T>
__device__ float derivative(float dy, float z, bool silu, float* active) {
  if (!silu) {
    *active = z;
    return dy;
  }
  const float s = sigmoid<T>(z);
  *active = z * s;
  return dy * (s + *active * (1.0f - s));
}

// run(count), of as many tensors as dx adds, where the count is a type: kernels that add none have no code for it.
template <class Run>
auto by_additions(int count, const Run& run) {
  static_assert(kMaxAdded == 2);
  if (count == 0) return run(std::integral_constant<int, 0>());
  return count == 1 ? run(std::integral_constant<int, 1>()) : run(std::integral_constant<int, 2>());
}

// What a backward kernel is told beside how its work is cut.
struct Operands {
  Sources x, dx, added[kMaxAdded];
  void* dy;
  Rows scale, offset, mean, inverse;
  bool silu;
  float* sums;
  void* active;
};

inline Operands operands_of(const NormGradient& plan) {
  return {sources(plan.x),
          sources(plan.dx),
          {sources(plan.added[0]), sources(plan.added[1])},
          const_cast<void*>(plan.dy),
          plan.scale,
          plan.offset,
          plan.mean,
          plan.inverse,
          plan.silu,
          plan.sums,
          plan.active};
}

// The gradients of scale and offset: the sums of a sample, or of all samples where these share a row.
struct Parameters {
  const float* sums;
  int batch, channels;
  bool per_sample[2];
  float* to[2];
};

constexpr int kLanes = 32, kSlices = 8;  // channels of a block; slices of the batch

inline Parameters parameters_of(const NormGradient& plan) {
  return {plan.sums,
          static_cast<int>(plan.batch),
          static_cast<int>(plan.x.total),
          {plan.offset.stride > 0, plan.scale.stride > 0},
          {plan.of_offset, plan.of_scale}};
}

// By a block of kLanes · kSlices threads, of kLanes channels: 0 of offset, 1 of scale.
__device__ inline void add_samples(const Parameters& p, int channels, int which) {
  __shared__ float partial[kSlices][kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, slice = static_cast<int>(threadIdx.x) / kLanes;
  const int channel = channels * kLanes + lane;
  const bool there = channel < p.channels;
  const auto sum = [&](int sample) { return p.sums[(2LL * sample + which) * p.channels + channel]; };
  float* const to = p.to[which] + channel;
  if (p.per_sample[which]) {
    for (int sample = slice; there && sample < p.batch; sample += kSlices) {
      to[static_cast<int64_t>(sample) * p.channels] = sum(sample);
    }
    return;
  }
  float total = 0;
#pragma unroll 4
  for (int sample = slice; there && sample < p.batch; sample += kSlices) total += sum(sample);
  partial[slice][lane] = total;
  __syncthreads();
  if (slice > 0 || !there) return;
#pragma unroll
  for (int i = 1; i < kSlices; ++i) total += partial[i][lane];
  *to = total;
}

}  // namespace jaxunet::cuda
