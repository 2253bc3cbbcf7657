// Two numbers per query that the backward pass needs: lse, the base-two log-sum-exp of the query's
// logits, and delta, the sum of dO * O over the query's row (Dao 2023, arXiv 2307.08691).
//
// flash_delta_kernel computes the deltas of all queries in a launch of its own. Without this
// launch, each block of flash_backward.cuh computes the deltas that it needs. kWidth / 8 lanes
// divide a row, eight columns each. The kernel uses neither shared memory nor barriers. It writes
// each delta to the first four bytes of the query's row of dq, where later launches read it before
// they write dq.
#pragma once

#include <cmath>

#include "common/integers.h"
#include "common/launch.cuh"
#include "flash_tile.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// The dot product of a row of O and a row of dO, divided among adjacent lanes, eight columns each.
template <class T>
struct RowProduct {
  Eight<T> out, grad;
  bool valid;

  // `row` may be beyond the tokens.
  __device__ void load(const HeadRows<const T>& from, const HeadRows<const T>& other, int row,
                       int column) {
    valid = row < from.tokens && column < from.width;
    if (!valid) return;
    out.load(from.at(row, column));
    grad.load(other.at(row, column));
  }
  // Returns the sum over kLanes lanes to each of them.
  template <int kLanes>
  __device__ float sum() const {
    float total = 0;
    if (valid) {
#pragma unroll
      for (int i = 0; i < 8; ++i) total += wide(out.at[i]) * wide(grad.at[i]);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2)
      total += __shfl_xor_sync(0xffffffff, total, offset);
    return total;
  }
};

// Loads the base-two lse of `rows` rows from `first` on and, if `deltas_ready`, their deltas from
// dq's memory. Rows beyond the tokens get an infinite lse, which makes their weights zero.
template <class S, class T>
__device__ void load_row_statistics(const float* lse, const HeadRows<T>& dq, bool deltas_ready,
                                    int first, int rows, float* lses, float* deltas) {
  for (int row = threadIdx.x; row < rows; row += S::kThreads) {
    const bool token = first + row < dq.tokens;
    lses[row] = token ? lse[first + row] * kLog2e : INFINITY;
    if (deltas_ready)
      deltas[row] = token ? *reinterpret_cast<const float*>(dq.at(first + row, 0)) : 0.0f;
  }
}

// Computes the deltas of `rows` rows from `first` on.
template <class S, class T>
__device__ void compute_deltas(const HeadRows<const T>& out, const HeadRows<const T>& grad,
                               int first, int rows, float* deltas) {
  constexpr int lanes = S::kWidth / 8, rows_a_pass = S::kThreads / lanes,
                unroll = sizeof(T) == 2 ? 4 : 2;
  const int column = static_cast<int>(threadIdx.x) % lanes * 8,
            first_row = static_cast<int>(threadIdx.x) / lanes;
  for (int start = first_row; start - first_row < rows; start += unroll * rows_a_pass) {
    RowProduct<T> products[unroll];
#pragma unroll
    for (int i = 0; i < unroll; ++i)
      products[i].load(out, grad, first + start + i * rows_a_pass, column);
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      const float delta = products[i].template sum<lanes>();
      if (column == 0 && start + i * rows_a_pass < rows) deltas[start + i * rows_a_pass] = delta;
    }
  }
}

constexpr int kDeltaThreads = 256;  // per block of flash_delta_kernel

// Grid: (rows of all heads / rows of a block).
template <class T, int kWidth>
__global__ void __launch_bounds__(kDeltaThreads) flash_delta_kernel(const AttentionBackward plan) {
  constexpr int lanes = kWidth / 8;
  const int64_t head_row =
      static_cast<int64_t>(blockIdx.x) * (kDeltaThreads / lanes) + threadIdx.x / lanes;
  const bool some = head_row < plan.batch * plan.heads * plan.tokens;
  const Head<AttentionBackward> head{plan, some ? head_row / plan.tokens : 0};
  const int row = static_cast<int>(some ? head_row % plan.tokens : plan.tokens),
            column = threadIdx.x % lanes * 8;
  RowProduct<T> product;
  product.load(head.unpacked(static_cast<const T*>(plan.out)),
               head.unpacked(static_cast<const T*>(plan.grad)), row, column);
  const float delta = product.template sum<lanes>();
  if (some && column == 0) {
    *reinterpret_cast<float*>(head.packed(static_cast<T*>(plan.dqkv), kQ).at(row, 0)) = delta;
  }
}

// Number of blocks of flash_delta_kernel.
template <int kWidth>
int64_t delta_blocks(const AttentionBackward& plan) {
  constexpr int kRows = kDeltaThreads / (kWidth / 8);  // per block
  return ceil_div(plan.batch * plan.heads * plan.tokens, kRows);
}

// The caller checks that the number of blocks fits in a grid.
template <class T, int kWidth>
cudaError_t launch_delta(const AttentionBackward& plan, cudaStream_t stream) {
  return launch(flash_delta_kernel<T, kWidth>,
                dim3(static_cast<unsigned>(delta_blocks<kWidth>(plan))), kDeltaThreads, 0, stream,
                plan);
}

}  // namespace jaxunet::cuda
