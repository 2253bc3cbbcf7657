// Flash attention forward. A block holds the queries of one head that its warps share out, 16 or 32 rows a warp, and
// walks over the keys and values, the next tile of which arrives while it works on this one. With two splits, a second
// set of warps takes the other half of every tile's keys, and the two partial softmaxes are merged at the end: that
// keeps an SM busy where heads are wide and few. Warps that share out the columns of v each find all weights: that
// keeps more warps busy where there are few queries.
#pragma once

#include <cmath>

#include "../conv3x3/launch.cuh"
#include "flash_tile.cuh"
#include "plan.h"

namespace jaxunet::cuda {

template <class T_, int kWidth_, int kTiles_, int kGroups_, int kSplits_, int kKeys_, int kResident_ = 1,
          int kColumns_ = 1>
struct ForwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kTiles = kTiles_;        // of 16 rows, a warp
  static constexpr int kGroups = kGroups_;      // warps that share out the rows
  static constexpr int kSplits = kSplits_;      // warps that share out a tile's keys
  static constexpr int kKeys = kKeys_;          // a tile
  static constexpr int kResident = kResident_;  // blocks an SM, for which the registers must do
  static constexpr int kColumns = kColumns_;    // warps that share out the columns of v, each with all the weights
  static constexpr int kThreads = 32 * kGroups * kSplits * kColumns, kRows = 16 * kTiles * kGroups;
  static constexpr int kShare = kWidth / kColumns;                         // columns that a warp sums
  static constexpr int kMine = kKeys / kSplits;                            // keys of a tile that a warp takes
  static constexpr bool kHeld = sizeof(T) == 2 && kTiles * kWidth <= 128;  // q stays in registers

  static constexpr int bytes(int stages) { return (kRows + 2 * stages * kKeys) * kWidth * sizeof(T); }
  static_assert(kSplits == 1 || kColumns == 1);
  // Merging passes the sums of the second split, and two numbers a row, through the same memory.
  static_assert(kSplits == 1 || kRows * (kWidth + 2) * 4 <= (kRows + 2 * kKeys) * kWidth * static_cast<int>(sizeof(T)));
};

template <class S>
class Forward {
  using T = typename S::T;
  using Place = Tile<T, S::kWidth>;
  static constexpr int kBlocks = S::kMine / 8;  // of 8 keys

  const Place q_;
  const int tokens_, row_, mine_, column_;  // the warp's first row in the block; its first key in a tile; its columns
  const float scale2_;
  Fragment<T> held_[S::kHeld ? S::kTiles : 1][S::kHeld ? S::kWidth / 16 : 1];
  float out_[S::kTiles][S::kShare / 8][4] = {};
  float top_[S::kTiles][2], total_[S::kTiles][2];  // of the row and of the one 8 below; total: this lane's columns

 public:
  __device__ Forward(const Place& q, int tokens, int width)
      : q_(q),
        tokens_(tokens),
        row_(static_cast<int>(threadIdx.x) / 32 % S::kGroups * 16 * S::kTiles),
        // Constant where nothing is shared out: with them the addresses within a tile.
        mine_(S::kSplits > 1 ? static_cast<int>(threadIdx.x) / 32 / S::kGroups * S::kMine : 0),
        column_(S::kColumns > 1 ? static_cast<int>(threadIdx.x) / 32 / S::kGroups * S::kShare : 0),
        scale2_(kLog2e / sqrtf(static_cast<float>(width))) {
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
      for (int half = 0; half < 2; ++half) {
        top_[m][half] = -INFINITY;
        total_[m][half] = 0;
      }
    }
  }

  __device__ void hold() {
    if constexpr (S::kHeld) {
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
        for (int k = 0; k < S::kWidth / 16; ++k) held_[m][k] = left_along<false>(q_, row_ + 16 * m, 16 * k);
      }
    }
  }

  // The tile whose first key is `first`; kWhole: none of its keys is padding.
  template <bool kWhole>
  __device__ void step(const Place& keys, const Place& values, int first) {
    const int rest = tokens_ - first - mine_;  // keys that there are for this warp
    if (!kWhole && rest <= 0) return;
    float logits[S::kTiles][kBlocks][4] = {};
#pragma unroll kUnrolled < T, S::kWidth / 16>
    for (int k = 0; k < S::kWidth / 16; ++k) {
      Fragment<T> q[S::kTiles];
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) {
        if constexpr (S::kHeld) {
          q[m] = held_[m][k];
        } else {
          q[m] = left_along<false>(q_, row_ + 16 * m, 16 * k);
        }
      }
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        if (!kWhole && 8 * n >= rest) continue;
        const auto right = right_along(keys, mine_ + 8 * n, 16 * k);
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) multiply(&logits[m][n], q[m], right);
      }
    }
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) soften<kWhole>(logits[m], out_[m], top_[m], total_[m], rest);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      if (!kWhole && 8 * n >= rest) continue;
      Fragment<T> weights[S::kTiles];
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) weights[m] = left_sums<T>(&logits[m][n]);
#pragma unroll
      for (int d = 0; d < S::kShare / 8; d += 2) {
        const auto right = right_across(values, column_ + 8 * d, mine_ + 8 * n);
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) multiply(&out_[m][d], weights[m], right);
      }
    }
  }

  // Adds what the second split found; `spare` holds kRows · (kWidth + 2) numbers.
  __device__ void merge(float* spare) {
    const int lane = threadIdx.x % 32;
    if (mine_ > 0)
      each([&](int m, int half, int row) {
        float* const numbers = spare + row * (S::kWidth + 2);
        if (lane % 4 == 0) numbers[0] = top_[m][half];
        const float total = quad_sum(total_[m][half]);
        if (lane % 4 == 0) numbers[1] = total;
#pragma unroll
        for (int d = 0; d < S::kWidth / 8; ++d) {
          *reinterpret_cast<float2*>(numbers + 2 + 8 * d + lane % 4 * 2) =
              make_float2(out_[m][d][2 * half], out_[m][d][2 * half + 1]);
        }
      });
    __syncthreads();
    if (mine_ == 0)
      each([&](int m, int half, int row) {
        const float* const numbers = spare + row * (S::kWidth + 2);
        const float top = fmaxf(top_[m][half], numbers[0]);
        const float own = power_of_two((top_[m][half] - top) * scale2_);
        const float other = power_of_two((numbers[0] - top) * scale2_);
        top_[m][half] = top;
        total_[m][half] = total_[m][half] * own + (lane % 4 == 0 ? numbers[1] * other : 0.0f);
#pragma unroll
        for (int d = 0; d < S::kWidth / 8; ++d) {
          const float2 pair = *reinterpret_cast<const float2*>(numbers + 2 + 8 * d + lane % 4 * 2);
          out_[m][d][2 * half] = out_[m][d][2 * half] * own + pair.x * other;
          out_[m][d][2 * half + 1] = out_[m][d][2 * half + 1] * own + pair.y * other;
        }
      });
  }

  // The result, into the memory of q, and the log-sum-exp; `first`: the block's first row.
  __device__ void finish(float* norm, int first) {
    if (mine_ > 0) return;
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
      const float totals[2] = {quad_sum(total_[m][0]), quad_sum(total_[m][1])};
      store_sums(q_, out_[m], row_ + 16 * m, column_, 1 / totals[0], 1 / totals[1]);
      if (column_ > 0) continue;
      for (int half = 0; half < 2; ++half) {
        const int lane = threadIdx.x % 32, row = first + row_ + 16 * m + lane / 4 + 8 * half;
        if (lane % 4 == 0 && row < tokens_) norm[row] = (top_[m][half] * scale2_ + log2f(totals[half])) / kLog2e;
      }
    }
  }

 private:
  template <class Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(m, half, row_ + 16 * m + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half);
      }
    }
  }

  static __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
  }

  // Logits to weights, relative to the largest logit so far; what was summed before is made relative to it, too.
  template <bool kWhole>
  __device__ void soften(float (&logits)[kBlocks][4], float (&out)[S::kShare / 8][4], float (&top)[2],
                         float (&total)[2], int rest) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = top[half];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& logit = logits[j][2 * half + i];
          if (!kWhole && 8 * j + lane % 4 * 2 + i >= rest) logit = -INFINITY;
          most = fmaxf(most, logit);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));  // finite: there is a key
      const float base = most * scale2_, shrink = power_of_two(top[half] * scale2_ - base);
      float sum = 0;  // of the tile first: that rounds less
      top[half] = most;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& logit = logits[j][2 * half + i];
          logit = power_of_two(logit * scale2_ - base);
          sum += logit;
        }
      }
      total[half] = total[half] * shrink + sum;
#pragma unroll
      for (int d = 0; d < S::kShare / 8; ++d) {
        out[d][2 * half] *= shrink;
        out[d][2 * half + 1] *= shrink;
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    flash_forward_kernel(const AttentionForward plan, const int stages) {
  using T = typename S::T;
  using Place = Tile<T, S::kWidth>;
  const int tokens = static_cast<int>(plan.tokens), blocks = (tokens + S::kRows - 1) / S::kRows;
  const int first = static_cast<int>(blockIdx.x % blocks) * S::kRows, steps = (tokens + S::kKeys - 1) / S::kKeys;
  const Head<AttentionForward> head{plan, blockIdx.x / blocks};
  const auto* qkv = static_cast<const T*>(plan.qkv);
  const auto keys = head.packed(qkv, 1), values = head.packed(qkv, 2);

  T* const memory = reinterpret_cast<T*>(shared_memory());
  const Place q{memory};
  const auto tile = [&](int step, int which) {
    return Place{memory + (S::kRows + (step % stages * 2 + which) * S::kKeys) * S::kWidth};
  };
  const auto load = [&](int step) {
    fetch<S::kKeys, S::kThreads>(tile(step, 0), keys, step * S::kKeys);
    fetch<S::kKeys, S::kThreads>(tile(step, 1), values, step * S::kKeys);
  };

  Forward<S> state(q, tokens, static_cast<int>(plan.width));
  const bool busy = first + static_cast<int>(threadIdx.x) / 32 % S::kGroups * 16 * S::kTiles < tokens;
  fetch<S::kRows, S::kThreads>(q, head.packed(qkv, 0), first);
  load(0);
  for (int step = 0; step < steps; ++step) {
    wait_copies();
    __syncthreads();  // the tile is there, and nobody works on the one before
    if (stages > 1 && step + 1 < steps) load(step + 1);
    if (busy) {
      if (step == 0) state.hold();
      if ((step + 1) * S::kKeys <= tokens) {
        state.template step<true>(tile(step, 0), tile(step, 1), step * S::kKeys);
      } else {
        state.template step<false>(tile(step, 0), tile(step, 1), step * S::kKeys);
      }
    }
    if (stages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }
  if constexpr (S::kSplits > 1) {
    __syncthreads();
    state.merge(reinterpret_cast<float*>(memory));
    __syncthreads();
  }
  if constexpr (S::kColumns > 1) __syncthreads();  // the others' logits read q, too
  if (busy) state.finish(plan.norm + head.index * tokens, first);
  __syncthreads();
  write<S::kRows, S::kThreads>(q, head.unpacked(static_cast<T*>(plan.out)), first);
}

template <class S>
std::optional<cudaError_t> launch_forward(const AttentionForward& plan, int shared_bytes, cudaStream_t stream) {
  int stages = plan.tokens > S::kKeys ? 2 : 1;
  if (S::bytes(stages) > shared_bytes) stages = 1;
  const int64_t blocks = plan.batch * plan.heads * ((plan.tokens + S::kRows - 1) / S::kRows);
  if (S::bytes(stages) > shared_bytes || blocks > INT32_MAX) return std::nullopt;
  const cudaError_t error = allow_shared_memory(flash_forward_kernel<S>, S::bytes(stages));
  if (error != cudaSuccess) return error;
  return launch(flash_forward_kernel<S>, dim3(static_cast<unsigned>(blocks)), S::kThreads, S::bytes(stages), stream,
                plan, stages);
}

}  // namespace jaxunet::cuda
