// Shared by the backward kernels (backward_*.cu, parameter_gradients.cu): their operands, the
// derivative of SiLU, and the reduction of the gradients of scale and offset over the batch.
#pragma once

#include <type_traits>

#include "plan.h"
#include "vector.cuh"

namespace jaxunet::cuda {

// How a backward kernel computes act and its derivative. kFastSilu, by tanh.approx, is for bfloat16
// and a dy that was rounded to it. For normally distributed z and dy of deviation 1, the root mean
// square of its error bound is 0.064 times the error that rounding dy causes in dz
// (conv3x3/test_activation_error.py). An exact dy would give sums that are far more accurate.
enum class Act { kIdentity, kSilu, kFastSilu };

// Returns dz = dy * act'(z) for act = SiLU, and writes act(z).
template <class T>
__device__ float silu_gradient(float dy, float z, float* active) {
  const float s = sigmoid<T>(z);
  *active = z * s;
  return dy * (s + *active * (1.0f - s));
}

// Calls run(count) with the number of tensors to add to dx as a type, so that kernels that add none
// contain no code for it.
template <class Run>
auto with_added_count(int count, const Run& run) {
  static_assert(kMaxAdded == 2, "one case below for each count");
  if (count == 0) return run(std::integral_constant<int, 0>());
  return count == 1 ? run(std::integral_constant<int, 1>()) : run(std::integral_constant<int, 2>());
}

// NormGradient in the form that a kernel takes, without the tiling.
struct GradientOperands {
  TensorParts x, dx, added[kMaxAdded];
  void* dy;
  Rows scale, offset, mean, inverse;
  Act act;
  float* sums;
  void* active;
};

inline GradientOperands operands_of(const NormGradient& plan) {
  // The kernels with dropout have code for kSilu only.
  const bool fast = plan.rounded && plan.type == Type::kBfloat16 && !plan.dropout.seeds;
  return {tensor_parts(plan.x),
          tensor_parts(plan.dx),
          {tensor_parts(plan.added[0]), tensor_parts(plan.added[1])},
          const_cast<void*>(plan.dy),
          plan.scale,
          plan.offset,
          plan.mean,
          plan.inverse,
          !plan.silu ? Act::kIdentity
          : fast     ? Act::kFastSilu
                     : Act::kSilu,
          plan.sums,
          plan.active};
}

// The gradients of offset (index 0) and scale (1): each sample's sums, or their total over the
// batch if all samples share a row.
struct ParameterGradients {
  const float* sums;  // (batch, 2, channels)
  int batch, channels;
  bool per_sample[2];
  float* to[2];
};

// A block that reduces these gradients has kReduceChannels threads for each slice of the batch: few
// slices beside other work, many in a kernel of its own, whose few blocks must load much at a time.
constexpr int kReduceChannels = 32, kReduceSlices = 8, kManyReduceSlices = kReduceChannels;

inline ParameterGradients parameter_gradients_of(const NormGradient& plan) {
  return {plan.sums,
          static_cast<int>(plan.batch),
          static_cast<int>(plan.x.total),
          {plan.offset.stride > 0, plan.scale.stride > 0},
          {plan.doffset, plan.dscale}};
}

// Reduces kReduceChannels channels, from kReduceChannels * tile on, of offset (which = 0) or scale
// (1). Called by all kReduceChannels * kSlices threads of a block; samples are added in the same
// order in every run.
template <int kSlices>
__device__ void reduce_parameter_gradients(const ParameterGradients& p, int tile, int which) {
  constexpr bool kMany = kSlices == kManyReduceSlices;
  // One more column, so that a warp reads a column without bank conflicts.
  __shared__ float partial[kSlices][kReduceChannels + (kMany ? 1 : 0)];
  const int lane = static_cast<int>(threadIdx.x) % kReduceChannels;
  const int slice = static_cast<int>(threadIdx.x) / kReduceChannels;
  const int channel = tile * kReduceChannels + lane;
  const bool there = channel < p.channels;
  const auto sum = [&](int sample) {
    return p.sums[(2LL * sample + which) * p.channels + channel];
  };
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
  if constexpr (kMany) {  // warp `slice` adds the slices of one channel
    total = partial[lane][slice];
    for (int step = kReduceChannels / 2; step > 0; step /= 2)
      total += __shfl_xor_sync(~0u, total, step);
    const int own = tile * kReduceChannels + slice;
    if (lane == 0 && own < p.channels) p.to[which][own] = total;
  } else {
    if (slice > 0 || !there) return;
#pragma unroll
    for (int i = 1; i < kSlices; ++i) total += partial[i][lane];
    *to = total;
  }
}

}  // namespace jaxunet::cuda
