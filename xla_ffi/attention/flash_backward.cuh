// Flash attention backward on the tensor cores (mma.sync): the weights p are recomputed from the
// log-sum-exp (Dao 2023, arXiv 2307.08691). With s = q * k^T / sqrt(width), dO the gradient of out,
// and delta = sum over the keys of p * dp = sum over the channels of dO * O, for each query:
//   p = exp(s - lse),  dp = dO * v^T,  ds = p * (dp - delta),
//   dv = p^T * dO,  dk = ds^T * q / sqrt(width),  dq = ds * k / sqrt(width).
// flash_shapes.cuh lists the shapes in use and dispatches to them.
//
// A block *owns* kRows rows of one head, either queries or keys: they stay in shared memory, and
// the block computes their gradients. All rows of the other kind are *streamed* through shared
// memory, in tiles of kStreamRows. Both kinds of block run the same code, in which a and b are the
// owned rows, c and d the streamed rows, and da and db the results (factors left out):
//
//   owned     a  b    streamed  c  d    two products                     results
//   queries   q  dO   keys      k  v    s   = a * c^T   dp   = b * d^T   da = dq = ds * c
//   keys      k  v    queries   q  dO   s^T = a * c^T   dp^T = b * d^T   da = dk = ds^T * c
//                                                                        db = dv = p^T * d
//
// Both kinds of block compute s and dp, so that no block adds to another's results: there are no
// atomics, and results are the same in every run. If a head has so few tokens that one block owns
// all keys, this block also computes dq, for which its warps exchange ds through shared memory
// (Owned::kAllKeys).
//
// kRowWarps groups of kColumnWarps warps divide the owned rows, kWarpTiles * 16 rows per group. The
// warps of a group, more than one for wide heads, divide the columns of the results. They get p and
// ds in one of two ways:
// - kExchanges: each warp computes p and ds for a part of the streamed rows, and the warps exchange
//   them through shared memory.
// - kRecomputes: each warp computes all of p and ds. For tiles of fewer than kColumnWarps * 16
//   streamed rows.
//
// Phases:
// - Prologue: start the copies of a, b and the first tile; load lse and delta.
// - Mainloop: wait for a tile, start the copy of the next one; then compute both products, the
//   gradient of the softmax, and the products that give the results.
// - Epilogue: write the results through the shared memory of a and b.
//
// Shared memory: lse and delta, float [kSegment] each; a, b [kRows][kWidth]; `stages` (1 or 2)
// times {c, d} [kStreamRows][kWidth]; ds and p [kRows][kStreamRows], if exchanged.
//
// Synchronisation: one __syncthreads per tile, after which the tile has arrived and no warp reads
// the previous tile; one more if p and ds are exchanged; one more with a single stage, before its
// next copy. Blocks that own keys have one more before each segment of lse and delta but the first.
// The epilogue has two: before the results overwrite a and b, and before they are read there.
#pragma once

#include <optional>

#include "common/integers.h"
#include "common/launch.cuh"
#include "flash_backward_warp.cuh"
#include "flash_delta.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// Does all work of a block. `first`: the first owned row. `deltas_ready`: flash_delta_kernel has
// written the deltas to dq's memory; otherwise this block computes the deltas that it needs.
template <class S, Owned kOwned>
__device__ void process_block(const AttentionBackward& plan, const Head<AttentionBackward>& head,
                              int first, int stages, bool deltas_ready) {
  using T = typename S::T;
  using SmemTile = Tile<T, S::kWidth>;
  constexpr bool kOwnsQueries = kOwned == Owned::kQueries, kAll = kOwned == Owned::kAllKeys;
  const int tokens = static_cast<int>(plan.tokens),
            steps = (tokens + S::kStreamRows - 1) / S::kStreamRows;
  const auto* qkv = static_cast<const T*>(plan.qkv);
  const auto q = head.packed(qkv, kQ), k = head.packed(qkv, kK), v = head.packed(qkv, kV);
  const auto out = head.unpacked(static_cast<const T*>(plan.out)),
             grad = head.unpacked(static_cast<const T*>(plan.grad));
  const float* const lse = plan.lse + head.index * tokens;
  const auto dq = head.packed(static_cast<T*>(plan.dqkv), kQ),
             dk = head.packed(static_cast<T*>(plan.dqkv), kK),
             dv = head.packed(static_cast<T*>(plan.dqkv), kV);

  float* const lses = reinterpret_cast<float*>(shared_memory());
  float* const deltas = lses + S::kSegment;
  T* const memory = reinterpret_cast<T*>(deltas + S::kSegment);
  const SmemTile a{memory}, b{memory + S::kRows * S::kWidth};
  const auto tile = [&](int step, int which) {
    return SmemTile{memory +
                    (2 * S::kRows + (step % stages * 2 + which) * S::kStreamRows) * S::kWidth};
  };
  const auto load = [&](int step) {
    fetch<S::kStreamRows, S::kThreads>(tile(step, 0), kOwnsQueries ? k : q, step * S::kStreamRows);
    fetch<S::kStreamRows, S::kThreads>(tile(step, 1), kOwnsQueries ? v : grad,
                                       step * S::kStreamRows);
  };
  T* const exchange = memory + 2 * (S::kRows + stages * S::kStreamRows) * S::kWidth;

  fetch<S::kRows, S::kThreads>(a, kOwnsQueries ? q : k, first);
  fetch<S::kRows, S::kThreads>(b, kOwnsQueries ? grad : v, first);
  load(0);
  // lse and delta of the owned queries, or of the first segment of streamed queries.
  const int first_query = kOwnsQueries ? first : 0,
            queries = kOwnsQueries ? S::kRows : min(steps * S::kStreamRows, S::kSegment);
  load_row_statistics<S>(lse, dq, deltas_ready, first_query, queries, lses, deltas);
  if (!deltas_ready)  // in this case one segment holds all queries
    compute_deltas<S>(out, grad, first_query, queries, deltas);
  Backward<S, kOwned> state(a, b, exchange, lses, deltas, tokens, static_cast<int>(plan.width),
                            first);
  for (int step = 0; step < steps; ++step) {
    const int start = step * S::kStreamRows;
    if (!kOwnsQueries && !kAll && step > 0 && start % S::kSegment == 0) {
      __syncthreads();
      load_row_statistics<S>(lse, dq, deltas_ready, start,
                             min((steps - step) * S::kStreamRows, S::kSegment), lses, deltas);
    }
    cp_async_wait_all();
    __syncthreads();  // the tile has arrived; no warp reads the previous one
    if (stages > 1 && step + 1 < steps) load(step + 1);
    if (step == 0) state.load_owned();
    if (start + S::kStreamRows <= tokens && (!kAll || tokens == S::kRows)) {
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
  state.store();
  __syncthreads();
  write<S::kRows, S::kThreads>(a, kOwnsQueries ? dq : dk, first);
  if (!kOwnsQueries) write<S::kRows, S::kThreads>(b, dv, first);
}

// What the blocks of a launch own. kBoth: half of the blocks own keys and half queries, in a single
// launch. Otherwise all blocks own the same kind, and flash_delta_kernel runs first.
enum class Owners { kBoth, kKeys, kQueries };

// Grid: (batch * heads * blocks of kRows rows), twice as many with Owners::kBoth. The blocks that
// own keys come first, because they take longer.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    flash_backward_kernel(const AttentionBackward plan, const int stages, const Owners owners) {
  const unsigned blocks = (static_cast<int>(plan.tokens) + S::kRows - 1) / S::kRows;
  const unsigned count = owners == Owners::kBoth ? gridDim.x / 2 : gridDim.x,
                 block = blockIdx.x % count;
  const Head<AttentionBackward> head{plan, block / blocks};
  const int first = static_cast<int>(block % blocks) * S::kRows;
  const bool deltas_ready = owners != Owners::kBoth;
  if (owners == Owners::kBoth ? blockIdx.x < count : owners == Owners::kKeys) {
    process_block<S, Owned::kKeys>(plan, head, first, stages, deltas_ready);
  } else {
    process_block<S, Owned::kQueries>(plan, head, first, stages, deltas_ready);
  }
}

// For few tokens: one block owns all keys of a head. Grid: (batch * heads).
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    flash_backward_few_kernel(const AttentionBackward plan, const int stages) {
  process_block<S, Owned::kAllKeys>(plan, Head<AttentionBackward>{plan, blockIdx.x}, 0, stages,
                                    false);
}

// Returns how many stages fit in the device's shared memory, at most as many as there are tiles; 0
// if none fits. `all_keys`: one block owns all keys of a head.
template <class S>
int fitting_stages(int64_t tokens, bool all_keys, int shared_bytes) {
  for (int stages = tokens > S::kStreamRows ? 2 : 1; stages; --stages) {
    if (S::bytes(stages, all_keys) <= shared_bytes) return stages;
  }
  return 0;
}

// Launches the kernel for few tokens, at most S::kRows; returns nothing if its tiles do not fit in
// `shared_bytes`.
template <class S>
std::optional<cudaError_t> launch_backward_few(const AttentionBackward& plan, int shared_bytes,
                                               cudaStream_t stream) {
  const int64_t blocks = plan.batch * plan.heads;
  const int stages = fitting_stages<S>(plan.tokens, true, shared_bytes),
            bytes = S::bytes(stages, true);
  if (!stages || blocks > INT32_MAX) return std::nullopt;
  const cudaError_t error = allow_shared_memory(flash_backward_few_kernel<S>, bytes);
  if (error != cudaSuccess) return error;
  return launch(flash_backward_few_kernel<S>, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                bytes, stream, plan, stages);
}

// Launches the general kernels; returns nothing if their tiles do not fit in `shared_bytes`. Each
// block that owns keys needs the deltas of all queries. If at most two blocks own the keys of a
// head, each computes these deltas itself, and one launch does everything. Otherwise a first launch
// writes the deltas to dq's memory, a second computes dk and dv, and a third overwrites the deltas
// with dq.
template <class S>
std::optional<cudaError_t> launch_backward(const AttentionBackward& plan, int shared_bytes,
                                           cudaStream_t stream) {
  using T = typename S::T;
  const int64_t blocks = ceil_div(plan.tokens, S::kRows), all = plan.batch * plan.heads * blocks;
  const int stages = fitting_stages<S>(plan.tokens, false, shared_bytes),
            bytes = S::bytes(stages, false);
  if (!stages || 2 * all > INT32_MAX) return std::nullopt;
  cudaError_t error = allow_shared_memory(flash_backward_kernel<S>, bytes);
  const auto run = [&](Owners owners) {
    const dim3 grid(static_cast<unsigned>(owners == Owners::kBoth ? 2 * all : all));
    if (error == cudaSuccess) {
      error =
          launch(flash_backward_kernel<S>, grid, S::kThreads, bytes, stream, plan, stages, owners);
    }
  };
  static_assert(2 * S::kRows <= S::kSegment, "two blocks find all deltas in one segment");
  if (blocks <= 2) {
    run(Owners::kBoth);
    return error;
  }
  if (delta_blocks<S::kWidth>(plan) > INT32_MAX) return std::nullopt;
  if (error == cudaSuccess) error = launch_delta<T, S::kWidth>(plan, stream);
  run(Owners::kKeys);
  run(Owners::kQueries);
  return error;
}

}  // namespace jaxunet::cuda
