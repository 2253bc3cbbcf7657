// Flash attention backward: the weights are computed again from the log-sum-exp.
//
// A block owns rows of one head and walks over the others, the next tile of which arrives while it works on this one.
// With the weights p = 2^(q·k - norm), their gradients dp = dO·v, and ds = p (dp - delta), delta = Σ p dp = dO·O:
// - a block that owns queries (q and dO) walks over k and v:    s = q·kᵀ,  dp = dO·vᵀ,  dq += ds·k;
// - a block that owns keys (k and v) walks over q and dO:       s = k·qᵀ,  dp = v·dOᵀ,  dk += ds·q,  dv += p·dO;
// both are the same walk. Where few tokens fit one block that owns all keys, it finds dq as well, by exchanging ds
// between its warps through shared memory.
//
// Warps share out the owned rows; where heads are wide, also the columns of the sums: such warps each compute a part of
// p and ds, and exchange them; or, where a passing tile has no 16 rows for each of them, each computes all of both.
#pragma once

#include <cmath>

#include "../conv3x3/launch.cuh"
#include "flash_delta.cuh"
#include "flash_tile.cuh"
#include "plan.h"

namespace jaxunet::cuda {

template <class T_, int kWidth_, int kTiles_, int kGroups_, int kColumns_, int kStream_, int kResident_ = 1>
struct BackwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kTiles = kTiles_;        // of 16 owned rows, a warp
  static constexpr int kGroups = kGroups_;      // warps that share out the owned rows
  static constexpr int kColumns = kColumns_;    // warps that share out the columns
  static constexpr int kStream = kStream_;      // rows of a tile that passes by
  static constexpr int kResident = kResident_;  // blocks an SM, for which the registers must do
  // Where a tile has no 16 rows for each warp that shares out the columns, each computes all of p and ds.
  static constexpr bool kAgain = kStream < 16 * kColumns, kShared = kColumns > 1 && !kAgain;
  static constexpr int kWarps = kGroups * kColumns, kThreads = 32 * kWarps, kRows = 16 * kTiles * kGroups;
  static constexpr int kSegment = 512;                           // rows whose norm and delta are held at a time
  static constexpr bool kHeld = sizeof(T) == 2 && kWidth <= 32;  // owned rows stay in registers

  static_assert(kStream % (kAgain ? 16 : 16 * kColumns) == 0 && kSegment % kStream == 0 && kSegment >= kRows);
  static constexpr int bytes(int stages, bool all) {
    const int exchanges = kShared + (kShared || all);
    return 2 * kSegment * 4 + (2 * (kRows + stages * kStream) * kWidth + exchanges * kRows * kStream) * sizeof(T);
  }
};

enum class Owned { kQueries, kKeys, kAllKeys };  // kAllKeys: and dq is found as well

template <class S, Owned kOwned>
class Backward {
  using T = typename S::T;
  using Place = Tile<T, S::kWidth>;
  using Exchange = Tile<T, S::kStream>;
  static constexpr bool kQueries = kOwned == Owned::kQueries, kShared = S::kShared;
  // Rows of a passing tile for which a warp computes p and ds; columns that it sums.
  static constexpr int kPart = S::kAgain ? S::kStream : S::kStream / S::kColumns, kMine = S::kWidth / S::kColumns;

  const Place a_, b_;  // owned: q and dO, or k and v
  const Exchange p_, ds_;
  const float *norms_, *deltas_;
  const int tokens_, first_, row_, part_, column_;  // the block's first row; the warp's in it; its share of the others
  const float scale_;
  Fragment<T> held_[2][S::kHeld ? S::kTiles : 1][S::kHeld ? S::kWidth / 16 : 1];
  float slopes_[S::kTiles][kMine / 8][4] = {};                 // of q or k
  float values_[kQueries ? 1 : S::kTiles][kMine / 8][4] = {};  // of v
  float norm_[S::kTiles][2], delta_[S::kTiles][2];             // of owned queries

 public:
  __device__ Backward(const Place& a, const Place& b, T* exchange, const float* norms, const float* deltas, int tokens,
                      int width, int first)
      : a_(a),
        b_(b),
        p_{exchange + S::kRows * S::kStream},
        ds_{exchange},
        norms_(norms),
        deltas_(deltas),
        tokens_(tokens),
        first_(first),
        row_(static_cast<int>(threadIdx.x) / 32 % S::kGroups * 16 * S::kTiles),
        part_(!kShared ? 0 : static_cast<int>(threadIdx.x) / 32 / S::kGroups * kPart),
        column_(S::kColumns > 1 ? static_cast<int>(threadIdx.x) / 32 / S::kGroups * kMine : 0),
        scale_(1 / sqrtf(static_cast<float>(width))) {}

  __device__ bool busy() const { return first_ + row_ < tokens_; }

  // Once the owned rows are there.
  __device__ void hold() {
    if constexpr (S::kHeld) {
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
        for (int k = 0; k < S::kWidth / 16; ++k) {
          held_[0][m][k] = left_along<false>(a_, row_ + 16 * m, 16 * k);
          held_[1][m][k] = left_along<false>(b_, row_ + 16 * m, 16 * k);
        }
      }
    }
    if constexpr (kQueries) {
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row_ + 16 * m + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
          norm_[m][half] = norms_[row];
          delta_[m][half] = deltas_[row];
        }
      }
    }
  }

  // The tile of rows c and d whose first is `first`; kWhole: none of them, nor of all keys, is padding. All threads
  // come here.
  template <bool kWhole>
  __device__ void step(const Place& c, const Place& d, int first, const HeadRows<T>& dq) {
    float p[S::kTiles][kPart / 8][4] = {}, ds[S::kTiles][kPart / 8][4] = {};
    const bool some = busy() && (kWhole || first + part_ < tokens_);
    if (some) {
      product<0, kWhole>(p, a_, c, first);
      product<1, kWhole>(ds, b_, d, first);
      weigh<kWhole>(p, ds, first);
    }
    if constexpr (kShared || kOwned == Owned::kAllKeys) {
      if (some && (!S::kAgain || column_ == 0)) {
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) {
          store_sums(ds_, ds[m], row_ + 16 * m, part_, 1, 1);
          if constexpr (kShared && !kQueries) store_sums(p_, p[m], row_ + 16 * m, part_, 1, 1);
        }
      }
      __syncthreads();
    }
    if (busy()) {
#pragma unroll kShared ? kUnrolled < T, S::kStream / 16> : S::kStream / 16
      for (int n = 0; n < S::kStream / 8; n += 2) {
        if (!kWhole && first + 8 * n >= tokens_) continue;
        accumulate(slopes_, ds, ds_, c, n);
        if constexpr (!kQueries) accumulate(values_, p, p_, d, n);
      }
    }
    if constexpr (kOwned == Owned::kAllKeys) find_dq(first, dq);
  }

  // The sums, into the memory of the owned rows, which nobody reads any more.
  __device__ void finish() {
    if (!busy()) return;
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
      store_sums(a_, slopes_[m], row_ + 16 * m, column_, scale_, scale_);
      if constexpr (!kQueries) store_sums(b_, values_[m], row_ + 16 * m, column_, 1, 1);
    }
  }

 private:
  // sums += owned · otherᵀ for this warp's part of the passing rows.
  template <int kWhich, bool kWhole>
  __device__ void product(float (&sums)[S::kTiles][kPart / 8][4], const Place& owned, const Place& other, int first) {
#pragma unroll kUnrolled < T, S::kWidth / 16>
    for (int k = 0; k < S::kWidth / 16; ++k) {
      Fragment<T> left[S::kTiles];
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) {
        if constexpr (S::kHeld) {
          left[m] = held_[kWhich][m][k];
        } else {
          left[m] = left_along<false>(owned, row_ + 16 * m, 16 * k);
        }
      }
#pragma unroll
      for (int n = 0; n < kPart / 8; n += 2) {
        if (!kWhole && first + part_ + 8 * n >= tokens_) continue;
        const auto right = right_along(other, part_ + 8 * n, 16 * k);
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) multiply(&sums[m][n], left[m], right);
      }
    }
  }

  // p: logits to weights; ds: gradients of the weights to those of the logits. Zero where a key is padding.
  template <bool kWhole>
  __device__ void weigh(float (&p)[S::kTiles][kPart / 8][4], float (&ds)[S::kTiles][kPart / 8][4], int first) {
    const int lane = threadIdx.x % 32;
    const float scale2 = scale_ * kLog2e;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const int other = part_ + 8 * n + lane % 4 * 2;  // of the tile, and the next one
      float2 norm, delta;
      if constexpr (!kQueries) {
        norm = *reinterpret_cast<const float2*>(norms_ + (first % S::kSegment + other));
        delta = *reinterpret_cast<const float2*>(deltas_ + (first % S::kSegment + other));
      }
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float row_norm = kQueries ? norm_[m][i / 2] : i % 2 ? norm.y : norm.x;
          const float row_delta = kQueries ? delta_[m][i / 2] : i % 2 ? delta.y : delta.x;
          float weight = power_of_two(p[m][n][i] * scale2 - row_norm);
          if (kQueries && !kWhole && first + other + i % 2 >= tokens_) weight = 0;
          if (kOwned == Owned::kAllKeys && !kWhole && row_ + 16 * m + lane / 4 + i / 2 * 8 >= tokens_) weight = 0;
          p[m][n][i] = weight;
          ds[m][n][i] = weight * (ds[m][n][i] - row_delta);
        }
      }
    }
  }

  // sums += weights · other, for columns [8 n, 8 n + 16) of the weights.
  template <class Sums>
  __device__ void accumulate(Sums& sums, const float (&weights)[S::kTiles][kPart / 8][4], const Exchange& exchange,
                             const Place& other, int n) {
    Fragment<T> left[S::kTiles];
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
      if constexpr (kShared) {
        left[m] = left_along<true>(exchange, row_ + 16 * m, 8 * n);
      } else {
        left[m] = left_sums<T>(&weights[m][n]);
      }
    }
#pragma unroll
    for (int j = 0; j < kMine / 8; j += 2) {
      const auto right = right_across(other, column_ + 8 * j, 8 * n);
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) multiply(&sums[m][j], left[m], right);
    }
  }

  // dq = dsᵀ·k of the passing queries: the warps share out 16 rows and columns each.
  __device__ void find_dq(int first, const HeadRows<T>& dq) {
    constexpr int kParts = S::kStream / 16, kShare = S::kWidth / (S::kWarps / kParts);
    static_assert(kOwned != Owned::kAllKeys || (S::kWarps % kParts == 0 && kShare % 16 == 0));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp % kParts * 16,
              column = warp / kParts * kShare;
    if (first + row >= tokens_) return;
    float sums[kShare / 8][4] = {};
#pragma unroll
    for (int key = 0; key < S::kRows; key += 16) {
      if (key >= tokens_) continue;
      const auto left = left_across(ds_, row, key);
#pragma unroll
      for (int j = 0; j < kShare / 8; j += 2) multiply(&sums[j], left, right_across(a_, column + 8 * j, key));
    }
#pragma unroll
    for (int j = 0; j < kShare / 8; ++j) {
      const int d = column + 8 * j + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = first + row + lane / 4 + 8 * half;
        if (token < tokens_ && d < dq.width) {
          store_pair(dq.at(token, d), sums[j][2 * half] * scale_, sums[j][2 * half + 1] * scale_);
        }
      }
    }
  }
};

// One block's walk; `first`: its first owned row.
template <class S, Owned kOwned>
__device__ void walk(const AttentionBackward& plan, const Head<AttentionBackward>& head, int first, int stages,
                     bool ready) {
  using T = typename S::T;
  using Place = Tile<T, S::kWidth>;
  constexpr bool kQueries = kOwned == Owned::kQueries, kAll = kOwned == Owned::kAllKeys;
  const int tokens = static_cast<int>(plan.tokens), steps = (tokens + S::kStream - 1) / S::kStream;
  const auto* qkv = static_cast<const T*>(plan.qkv);
  const auto q = head.packed(qkv, 0), k = head.packed(qkv, 1), v = head.packed(qkv, 2);
  const auto out = head.unpacked(static_cast<const T*>(plan.out)),
             grad = head.unpacked(static_cast<const T*>(plan.grad));
  const float* const norm = plan.norm + head.index * tokens;
  const auto dq = head.packed(static_cast<T*>(plan.dqkv), 0), dk = head.packed(static_cast<T*>(plan.dqkv), 1);

  float* const norms = reinterpret_cast<float*>(shared_memory());
  float* const deltas = norms + S::kSegment;
  T* const memory = reinterpret_cast<T*>(deltas + S::kSegment);
  const Place a{memory}, b{memory + S::kRows * S::kWidth};
  const auto tile = [&](int step, int which) {
    return Place{memory + (2 * S::kRows + (step % stages * 2 + which) * S::kStream) * S::kWidth};
  };
  const auto load = [&](int step) {
    fetch<S::kStream, S::kThreads>(tile(step, 0), kQueries ? k : q, step * S::kStream);
    fetch<S::kStream, S::kThreads>(tile(step, 1), kQueries ? v : grad, step * S::kStream);
  };
  T* const exchange = memory + 2 * (S::kRows + stages * S::kStream) * S::kWidth;

  fetch<S::kRows, S::kThreads>(a, kQueries ? q : k, first);
  fetch<S::kRows, S::kThreads>(b, kQueries ? grad : v, first);
  load(0);
  const int own = kQueries ? first : 0, rows = kQueries ? S::kRows : min(steps * S::kStream, S::kSegment);
  read_rows<S>(norm, dq, ready, own, rows, norms, deltas);
  if (!ready) find_deltas<S>(out, grad, own, rows, deltas);  // a segment holds them all
  Backward<S, kOwned> state(a, b, exchange, norms, deltas, tokens, static_cast<int>(plan.width), first);
  for (int step = 0; step < steps; ++step) {
    const int start = step * S::kStream;
    if (!kQueries && !kAll && step > 0 && start % S::kSegment == 0) {
      __syncthreads();
      read_rows<S>(norm, dq, ready, start, min((steps - step) * S::kStream, S::kSegment), norms, deltas);
    }
    wait_copies();
    __syncthreads();  // the tile is there, and nobody works on the one before
    if (stages > 1 && step + 1 < steps) load(step + 1);
    if (step == 0) state.hold();
    if (start + S::kStream <= tokens && (!kAll || tokens == S::kRows)) {
      state.template step<true>(tile(step, 0), tile(step, 1), start, dq);
    } else {
      state.template step<false>(tile(step, 0), tile(step, 1), start, dq);
    }
    if (stages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }
  __syncthreads();
  state.finish();
  __syncthreads();
  write<S::kRows, S::kThreads>(a, kQueries ? dq : dk, first);
  if (!kQueries) write<S::kRows, S::kThreads>(b, head.packed(static_cast<T*>(plan.dqkv), 2), first);
}

enum class Turn { kBoth, kKeys, kQueries };

// `turn`: which blocks the launch holds; of both, those that own keys come first, as they take longer.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    flash_backward_kernel(const AttentionBackward plan, const int stages, const Turn turn) {
  const unsigned blocks = (static_cast<int>(plan.tokens) + S::kRows - 1) / S::kRows;
  const unsigned count = turn == Turn::kBoth ? gridDim.x / 2 : gridDim.x, block = blockIdx.x % count;
  const Head<AttentionBackward> head{plan, block / blocks};
  const int first = static_cast<int>(block % blocks) * S::kRows;
  if (turn == Turn::kBoth ? blockIdx.x < count : turn == Turn::kKeys) {
    walk<S, Owned::kKeys>(plan, head, first, stages, turn != Turn::kBoth);
  } else {
    walk<S, Owned::kQueries>(plan, head, first, stages, turn != Turn::kBoth);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    flash_backward_few_kernel(const AttentionBackward plan, const int stages) {
  walk<S, Owned::kAllKeys>(plan, Head<AttentionBackward>{plan, blockIdx.x}, 0, stages, false);
}

// The stages that fit the device's shared memory, at most as many as there are tiles; 0: not even one.
template <class S>
int stages_that_fit(int64_t tokens, bool all, int shared_bytes) {
  for (int stages = tokens > S::kStream ? 2 : 1; stages; --stages) {
    if (S::bytes(stages, all) <= shared_bytes) return stages;
  }
  return 0;
}

// The tokens fit the rows of S.
template <class S>
std::optional<cudaError_t> launch_backward_few(const AttentionBackward& plan, int shared_bytes, cudaStream_t stream) {
  const int64_t blocks = plan.batch * plan.heads;
  const int stages = stages_that_fit<S>(plan.tokens, true, shared_bytes), bytes = S::bytes(stages, true);
  if (!stages || blocks > INT32_MAX) return std::nullopt;
  const cudaError_t error = allow_shared_memory(flash_backward_few_kernel<S>, bytes);
  if (error != cudaSuccess) return error;
  return launch(flash_backward_few_kernel<S>, dim3(static_cast<unsigned>(blocks)), S::kThreads, bytes, stream, plan,
                stages);
}

// Every block that owns keys needs the deltas of all queries. Up to two blocks a head find them themselves, in one
// launch; for more a kernel of its own does, which keeps them in dq's memory until the third launch writes dq there.
template <class S>
std::optional<cudaError_t> launch_backward(const AttentionBackward& plan, int shared_bytes, cudaStream_t stream) {
  using T = typename S::T;
  const int64_t blocks = (plan.tokens + S::kRows - 1) / S::kRows, all = plan.batch * plan.heads * blocks;
  const int stages = stages_that_fit<S>(plan.tokens, false, shared_bytes), bytes = S::bytes(stages, false);
  if (!stages || 2 * all > INT32_MAX) return std::nullopt;
  cudaError_t error = allow_shared_memory(flash_backward_kernel<S>, bytes);
  const auto run = [&](Turn turn) {
    const dim3 grid(static_cast<unsigned>(turn == Turn::kBoth ? 2 * all : all));
    if (error == cudaSuccess) {
      error = launch(flash_backward_kernel<S>, grid, S::kThreads, bytes, stream, plan, stages, turn);
    }
  };
  static_assert(2 * S::kRows <= S::kSegment);
  if (blocks <= 2) {
    run(Turn::kBoth);
    return error;
  }
  constexpr int rows = 256 / (S::kWidth / 8);
  const int64_t grid = (plan.batch * plan.heads * plan.tokens + rows - 1) / rows;
  if (grid > INT32_MAX) return std::nullopt;
  if (error == cudaSuccess) {
    error = launch(flash_delta_kernel<T, S::kWidth>, dim3(static_cast<unsigned>(grid)), 256, 0, stream, plan);
  }
  run(Turn::kKeys);
  run(Turn::kQueries);
  return error;
}

}  // namespace jaxunet::cuda
