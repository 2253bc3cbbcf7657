// What a block of the backward pass needs to know of a query beside its row: norm, the log-sum-exp in base two, and
// delta = Σ p dp = dO·O.
#pragma once

#include <cmath>

#include "../conv3x3/launch.cuh"
#include "flash_tile.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// dO·O of a row, to each of the lanes that share it out; `row` may be beyond the tokens.
template <class T>
struct RowProduct {
  Eight<T> out, grad;
  bool valid;

  __device__ void load(const HeadRows<const T>& from, const HeadRows<const T>& other, int row, int column) {
    valid = row < from.tokens && column < from.width;
    if (!valid) return;
    out.load(from.at(row, column));
    grad.load(other.at(row, column));
  }
  template <int kLanes>
  __device__ float sum() const {
    float total = 0;
    if (valid) {
#pragma unroll
      for (int i = 0; i < 8; ++i) total += wide(out.at[i]) * wide(grad.at[i]);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2) total += __shfl_xor_sync(0xffffffff, total, offset);
    return total;
  }
};

// norm, base two, of `rows` rows from `first`, and their delta where it lies ready in dq's memory; a row beyond the
// tokens gets weights of zero.
template <class S, class T>
__device__ void read_rows(const float* norm, const HeadRows<T>& dq, bool ready, int first, int rows, float* norms,
                          float* deltas) {
  for (int row = threadIdx.x; row < rows; row += S::kThreads) {
    const bool token = first + row < dq.tokens;
    norms[row] = token ? norm[first + row] * kLog2e : INFINITY;
    if (ready) deltas[row] = token ? *reinterpret_cast<const float*>(dq.at(first + row, 0)) : 0.0f;
  }
}

// delta of `rows` rows from `first`.
template <class S, class T>
__device__ void find_deltas(const HeadRows<const T>& out, const HeadRows<const T>& grad, int first, int rows,
                            float* deltas) {
  constexpr int lanes = S::kWidth / 8, pass = S::kThreads / lanes, batch = sizeof(T) == 2 ? 4 : 2;
  const int column = static_cast<int>(threadIdx.x) % lanes * 8, own = static_cast<int>(threadIdx.x) / lanes;
  for (int start = own; start - own < rows; start += batch * pass) {
    RowProduct<T> products[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) products[i].load(out, grad, first + start + i * pass, column);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const float delta = products[i].template sum<lanes>();
      if (column == 0 && start + i * pass < rows) deltas[start + i * pass] = delta;
    }
  }
}

// delta of all rows, into the first bytes of the rows of dq.
template <class T, int kWidth>
__global__ void __launch_bounds__(256) flash_delta_kernel(const AttentionBackward plan) {
  constexpr int lanes = kWidth / 8;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (256 / lanes) + threadIdx.x / lanes;
  const bool some = unit < plan.batch * plan.heads * plan.tokens;
  const Head<AttentionBackward> head{plan, some ? unit / plan.tokens : 0};
  const int row = static_cast<int>(some ? unit % plan.tokens : plan.tokens), column = threadIdx.x % lanes * 8;
  RowProduct<T> product;
  product.load(head.unpacked(static_cast<const T*>(plan.out)), head.unpacked(static_cast<const T*>(plan.grad)), row,
               column);
  const float delta = product.template sum<lanes>();
  if (some && column == 0) {
    *reinterpret_cast<float*>(head.packed(static_cast<T*>(plan.dqkv), 0).at(row, 0)) = delta;
  }
}

}  // namespace jaxunet::cuda
