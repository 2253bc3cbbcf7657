// Flash attention forward on the tensor cores: out = softmax(q * k^T / sqrt(width)) * v and the
// log-sum-exp of each row, without storing the weights. Dao et al. 2022, arXiv 2205.14135; Dao
// 2023, arXiv 2307.08691. flash_shapes.cuh lists the shapes in use and dispatches to them.
//
// A block owns kRows queries of one head of one sample and iterates over tiles of kTileKeys keys
// and values. Grid: (batch * heads * blocks of queries), the blocks of one head side by side. Its
// warps divide the work:
// - kRowWarps warps take kWarpTiles * 16 rows each.
// - kKeySplits = 2: a second set of warps takes the other half of each tile's keys, and the two
//   partial softmaxes are merged at the end (split-K). This keeps the multiprocessors busy if there
//   are few and wide heads.
// - kColumnWarps > 1: this many warps compute the same weights and multiply them by different
//   columns of v, which gives a block more warps if there are few queries.
//
// Phases:
// - Prologue: start the copies of q and of the first tile.
// - Mainloop: wait for a tile, start the copy of the next one; then compute logits = q * k^T,
//   online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), out += weights * v.
// - Epilogue: merge the splits, divide by the sums, and write out through q's shared memory.
//
// Shared memory: q[kRows][kWidth], then `stages` (1 or 2) times {k, v}[kTileKeys][kWidth], all
// swizzled (flash_tile.cuh). With two splits, the same memory later carries the second split's
// results. One __syncthreads per tile: after it the tile has arrived, and no warp reads the
// previous tile, whose stage the next copy reuses. With a single stage, there is another
// __syncthreads before that copy.
#pragma once

#include <cmath>
#include <optional>

#include "common/integers.h"
#include "common/launch.cuh"
#include "flash_tile.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// Tile sizes and warp roles of a forward kernel; flash_shapes.cuh has those in use.
template <class T_, int kWidth_, int kWarpTiles_, int kRowWarps_, int kKeySplits_, int kTileKeys_,
          int kBlocksPerSm_ = 1, int kColumnWarps_ = 1>
struct ForwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;          // channels of a head, padded
  static constexpr int kWarpTiles = kWarpTiles_;  // 16-row tiles per warp
  static constexpr int kRowWarps = kRowWarps_;    // warps that divide the rows
  static constexpr int kKeySplits = kKeySplits_;  // warps that divide a tile's keys
  static constexpr int kTileKeys = kTileKeys_;    // keys per tile
  // Concurrent blocks per multiprocessor; bounds the registers per thread.
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kColumnWarps = kColumnWarps_;  // warps that divide the columns of v
  static constexpr int kThreads = 32 * kRowWarps * kKeySplits * kColumnWarps,
                       kRows = 16 * kWarpTiles * kRowWarps;
  static constexpr int kWarpColumns = kWidth / kColumnWarps;  // columns of out that a warp computes
  static constexpr int kWarpKeys = kTileKeys / kKeySplits;    // keys of a tile that a warp takes
  // q stays in registers if it needs at most 32 per lane.
  static constexpr bool kKeepsQueries = sizeof(T) == 2 && kWarpTiles * kWidth <= 128;

  // Bytes of shared memory.
  static constexpr int bytes(int stages) {
    return (kRows + 2 * stages * kTileKeys) * kWidth * sizeof(T);
  }
  static_assert(kKeySplits == 1 || kColumnWarps == 1, "merge_splits expects whole rows of a warp");
  static_assert(kKeySplits == 1 || kRows * (kWidth + 2) * 4 <= (kRows + 2 * kTileKeys) * kWidth *
                                                                   static_cast<int>(sizeof(T)),
                "the second split's output, max and sum pass through the memory of one stage");
};

// One warp's share of the block's work. Accumulators have the layout of mma.sync: in each 16 x 8
// block, a lane holds two adjacent columns of row lane / 4 and of the row 8 below it (`half` = 0,
// 1).
template <class S>
class Forward {
  using T = typename S::T;
  using SmemTile = Tile<T, S::kWidth>;
  static constexpr int kKeyBlocks = S::kWarpKeys / 8;  // 8-key blocks of a warp's logits

  const SmemTile q_;
  const int tokens_;
  // The warp's first row in the block, its first key in a tile, its first column of v.
  const int row_, first_key_, column_;
  const float scale2_;  // log2(e) / sqrt(width): logits in base two
  Fragment<T> query_fragments_[S::kKeepsQueries ? S::kWarpTiles : 1]
                              [S::kKeepsQueries ? S::kWidth / 16 : 1];
  float out_[S::kWarpTiles][S::kWarpColumns / 8][4] = {};
  // The largest logit of each row so far, and the sum of this lane's weights relative to it.
  float max_[S::kWarpTiles][2], sum_[S::kWarpTiles][2];

 public:
  __device__ Forward(const SmemTile& q, int tokens, int width)
      : q_(q),
        tokens_(tokens),
        row_(static_cast<int>(threadIdx.x) / 32 % S::kRowWarps * 16 * S::kWarpTiles),
        // Constants if the warps do not divide the dimension, so that addresses within a tile are
        // constants too.
        first_key_(S::kKeySplits > 1
                       ? static_cast<int>(threadIdx.x) / 32 / S::kRowWarps * S::kWarpKeys
                       : 0),
        column_(S::kColumnWarps > 1
                    ? static_cast<int>(threadIdx.x) / 32 / S::kRowWarps * S::kWarpColumns
                    : 0),
        scale2_(kLog2e / sqrtf(static_cast<float>(width))) {
#pragma unroll
    for (int m = 0; m < S::kWarpTiles; ++m) {
      for (int half = 0; half < 2; ++half) {
        max_[m][half] = -INFINITY;
        sum_[m][half] = 0;
      }
    }
  }

  // Loads q from shared memory into registers, if it is kept there. Call after its copy has
  // arrived.
  __device__ void load_queries() {
    if constexpr (S::kKeepsQueries) {
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) {
#pragma unroll
        for (int k = 0; k < S::kWidth / 16; ++k)
          query_fragments_[m][k] = left_k_major<false>(q_, row_ + 16 * m, 16 * k);
      }
    }
  }

  // Adds the tile whose first key is `first` to the output. kWhole: none of the tile's keys is
  // padding.
  template <bool kWhole>
  __device__ void step(const SmemTile& keys, const SmemTile& values, int first) {
    const int rest = tokens_ - first - first_key_;  // remaining keys for this warp
    if (!kWhole && rest <= 0) return;
    float logits[S::kWarpTiles][kKeyBlocks][4] = {};
#pragma unroll kUnrolled < T, S::kWidth / 16>
    for (int k = 0; k < S::kWidth / 16; ++k) {
      Fragment<T> q[S::kWarpTiles];
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) {
        if constexpr (S::kKeepsQueries) {
          q[m] = query_fragments_[m][k];
        } else {
          q[m] = left_k_major<false>(q_, row_ + 16 * m, 16 * k);
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        if (!kWhole && 8 * n >= rest) continue;
        const auto right = right_k_major(keys, first_key_ + 8 * n, 16 * k);
#pragma unroll
        for (int m = 0; m < S::kWarpTiles; ++m) multiply(&logits[m][n], q[m], right);
      }
    }
#pragma unroll
    for (int m = 0; m < S::kWarpTiles; ++m)
      online_softmax<kWhole>(logits[m], out_[m], max_[m], sum_[m], rest);
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      if (!kWhole && 8 * n >= rest) continue;
      Fragment<T> weights[S::kWarpTiles];
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) weights[m] = left_from_accumulators<T>(&logits[m][n]);
#pragma unroll
      for (int d = 0; d < S::kWarpColumns / 8; d += 2) {
        const auto right = right_mn_major(values, column_ + 8 * d, first_key_ + 8 * n);
#pragma unroll
        for (int m = 0; m < S::kWarpTiles; ++m) multiply(&out_[m][d], weights[m], right);
      }
    }
  }

  // Merges the second split's output into the first's through `buffer`, [kRows][kWidth + 2]: max,
  // sum, output. All threads must call this.
  __device__ void merge_splits(float* buffer) {
    const int lane = threadIdx.x % 32;
    if (first_key_ > 0)
      each_row([&](int m, int half, int row) {
        float* const numbers = buffer + row * (S::kWidth + 2);
        if (lane % 4 == 0) numbers[0] = max_[m][half];
        const float sum_so_far = quad_sum(sum_[m][half]);
        if (lane % 4 == 0) numbers[1] = sum_so_far;
#pragma unroll
        for (int d = 0; d < S::kWidth / 8; ++d) {
          *reinterpret_cast<float2*>(numbers + 2 + 8 * d + lane % 4 * 2) =
              make_float2(out_[m][d][2 * half], out_[m][d][2 * half + 1]);
        }
      });
    __syncthreads();
    if (first_key_ == 0)
      each_row([&](int m, int half, int row) {
        const float* const numbers = buffer + row * (S::kWidth + 2);
        const float max = fmaxf(max_[m][half], numbers[0]);
        const float own = power_of_two((max_[m][half] - max) * scale2_);
        const float other = power_of_two((numbers[0] - max) * scale2_);
        max_[m][half] = max;
        sum_[m][half] = sum_[m][half] * own + (lane % 4 == 0 ? numbers[1] * other : 0.0f);
#pragma unroll
        for (int d = 0; d < S::kWidth / 8; ++d) {
          const float2 pair = *reinterpret_cast<const float2*>(numbers + 2 + 8 * d + lane % 4 * 2);
          out_[m][d][2 * half] = out_[m][d][2 * half] * own + pair.x * other;
          out_[m][d][2 * half + 1] = out_[m][d][2 * half + 1] * own + pair.y * other;
        }
      });
  }

  // Writes the output to the shared memory of q, and the log-sum-exp. `first`: the block's first
  // row.
  __device__ void store(float* lse, int first) {
    if (first_key_ > 0) return;
#pragma unroll
    for (int m = 0; m < S::kWarpTiles; ++m) {
      const float row_sums[2] = {quad_sum(sum_[m][0]), quad_sum(sum_[m][1])};
      store_accumulators(q_, out_[m], row_ + 16 * m, column_, 1 / row_sums[0], 1 / row_sums[1]);
      if (column_ > 0) continue;
      for (int half = 0; half < 2; ++half) {
        const int lane = threadIdx.x % 32, row = first + row_ + 16 * m + lane / 4 + 8 * half;
        if (lane % 4 == 0 && row < tokens_)
          lse[row] = (max_[m][half] * scale2_ + log2f(row_sums[half])) / kLog2e;
      }
    }
  }

 private:
  // Calls visit(tile, half, row of the block) for each row of this lane.
  template <class Visit>
  __device__ void each_row(Visit visit) {
#pragma unroll
    for (int m = 0; m < S::kWarpTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(m, half, row_ + 16 * m + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half);
      }
    }
  }

  // Returns the sum over the four lanes that hold a row.
  static __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
  }

  // Online softmax: turns logits into weights relative to the largest logit so far, and rescales
  // the earlier sums accordingly. `rest`: keys that are not padding.
  template <bool kWhole>
  __device__ void online_softmax(float (&logits)[kKeyBlocks][4],
                                 float (&out)[S::kWarpColumns / 8][4], float (&max)[2],
                                 float (&sum_so_far)[2], int rest) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = max[half];
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& logit = logits[j][2 * half + i];
          if (!kWhole && 8 * j + lane % 4 * 2 + i >= rest) logit = -INFINITY;
          new_max = fmaxf(new_max, logit);
        }
      }
      new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, 1));
      new_max =
          fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, 2));  // finite: each tile has a key
      const float base = new_max * scale2_, rescale = power_of_two(max[half] * scale2_ - base);
      float sum = 0;  // over this tile only, which reduces rounding error
      max[half] = new_max;
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& logit = logits[j][2 * half + i];
          logit = power_of_two(logit * scale2_ - base);
          sum += logit;
        }
      }
      sum_so_far[half] = sum_so_far[half] * rescale + sum;
#pragma unroll
      for (int d = 0; d < S::kWarpColumns / 8; ++d) {
        out[d][2 * half] *= rescale;
        out[d][2 * half + 1] *= rescale;
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    flash_forward_kernel(const AttentionForward plan, const int stages) {
  using T = typename S::T;
  using SmemTile = Tile<T, S::kWidth>;
  const int tokens = static_cast<int>(plan.tokens), blocks = (tokens + S::kRows - 1) / S::kRows;
  const int first = static_cast<int>(blockIdx.x % blocks) * S::kRows,
            steps = (tokens + S::kTileKeys - 1) / S::kTileKeys;
  const Head<AttentionForward> head{plan, blockIdx.x / blocks};
  const auto* qkv = static_cast<const T*>(plan.qkv);
  const auto keys = head.packed(qkv, kK), values = head.packed(qkv, kV);

  T* const memory = reinterpret_cast<T*>(shared_memory());
  const SmemTile q{memory};
  const auto tile = [&](int step, int which) {
    return SmemTile{memory + (S::kRows + (step % stages * 2 + which) * S::kTileKeys) * S::kWidth};
  };
  const auto load = [&](int step) {
    fetch<S::kTileKeys, S::kThreads>(tile(step, 0), keys, step * S::kTileKeys);
    fetch<S::kTileKeys, S::kThreads>(tile(step, 1), values, step * S::kTileKeys);
  };

  Forward<S> state(q, tokens, static_cast<int>(plan.width));
  const bool has_rows =
      first + static_cast<int>(threadIdx.x) / 32 % S::kRowWarps * 16 * S::kWarpTiles < tokens;
  fetch<S::kRows, S::kThreads>(q, head.packed(qkv, kQ), first);
  load(0);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_all();
    __syncthreads();  // the tile has arrived; no warp reads the previous one
    if (stages > 1 && step + 1 < steps) load(step + 1);
    if (has_rows) {
      if (step == 0) state.load_queries();
      if ((step + 1) * S::kTileKeys <= tokens) {
        state.template step<true>(tile(step, 0), tile(step, 1), step * S::kTileKeys);
      } else {
        state.template step<false>(tile(step, 0), tile(step, 1), step * S::kTileKeys);
      }
    }
    if (stages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }
  if constexpr (S::kKeySplits > 1) {
    __syncthreads();
    state.merge_splits(reinterpret_cast<float*>(memory));
    __syncthreads();
  }
  if constexpr (S::kColumnWarps > 1) __syncthreads();  // other warps read the same rows of q
  if (has_rows) state.store(plan.lse + head.index * tokens, first);
  __syncthreads();
  write<S::kRows, S::kThreads>(q, head.unpacked(static_cast<T*>(plan.out)), first);
}

// Launches the kernel with as many stages as fit; returns nothing if its tiles do not fit in
// `shared_bytes`, or if the grid is too large.
template <class S>
std::optional<cudaError_t> launch_forward(const AttentionForward& plan, int shared_bytes,
                                          cudaStream_t stream) {
  int stages = plan.tokens > S::kTileKeys ? 2 : 1;
  if (S::bytes(stages) > shared_bytes) stages = 1;
  const int64_t blocks = plan.batch * plan.heads * ceil_div(plan.tokens, S::kRows);
  if (S::bytes(stages) > shared_bytes || blocks > INT32_MAX) return std::nullopt;
  const cudaError_t error = allow_shared_memory(flash_forward_kernel<S>, S::bytes(stages));
  if (error != cudaSuccess) return error;
  return launch(flash_forward_kernel<S>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                S::bytes(stages), stream, plan, stages);
}

}  // namespace jaxunet::cuda
