// A warp's share of the flash backward pass: the products of a tile and the gradient of the
// softmax. flash_backward.cuh has the formulas and the rest of the block's work.
#pragma once

#include "flash_tile.cuh"

namespace jaxunet::cuda {

// Tile sizes and warp roles of a backward kernel; flash_shapes.cuh lists those in use.
template <class T_, int kWidth_, int kWarpTiles_, int kRowWarps_, int kColumnWarps_,
          int kStreamRows_, int kBlocksPerSm_ = 1>
struct BackwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;          // channels of a head, padded
  static constexpr int kWarpTiles = kWarpTiles_;  // 16-row tiles of owned rows per warp
  static constexpr int kRowWarps = kRowWarps_;    // warps that divide the owned rows
  // Warps that divide the columns of the results.
  static constexpr int kColumnWarps = kColumnWarps_;
  static constexpr int kStreamRows = kStreamRows_;  // rows of a streamed tile
  // Concurrent blocks per multiprocessor; bounds the registers per thread.
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kRecomputes = kStreamRows < 16 * kColumnWarps,
                        kExchanges = kColumnWarps > 1 && !kRecomputes;
  static constexpr int kWarps = kRowWarps * kColumnWarps, kThreads = 32 * kWarps,
                       kRows = 16 * kWarpTiles * kRowWarps;
  // Streamed rows whose lse and delta are in shared memory at one time: 4 KB.
  static constexpr int kSegment = 512;
  // True if a and b stay in registers, at most 16 * kWarpTiles per lane.
  static constexpr bool kKeepsOwned = sizeof(T) == 2 && kWidth <= 32;

  static_assert(kStreamRows % (kRecomputes ? 16 : 16 * kColumnWarps) == 0,
                "a warp takes streamed rows 16 at a time");
  static_assert(kSegment % kStreamRows == 0 && kSegment >= kRows,
                "a segment holds whole tiles, and all owned rows");
  // Bytes of shared memory. `all_keys`: for a block that owns all keys, which always exchanges ds.
  static constexpr int bytes(int stages, bool all_keys) {
    const int exchanges = kExchanges + (kExchanges || all_keys);  // arrays exchanged: p, ds
    return 2 * kSegment * 4 +
           (2 * (kRows + stages * kStreamRows) * kWidth + exchanges * kRows * kStreamRows) *
               sizeof(T);
  }
};

// The rows that a block owns. A block that owns all keys of a head computes dq as well.
enum class Owned { kQueries, kKeys, kAllKeys };

// One warp's share of the block's work. Accumulators have the layout of mma.sync, as in
// flash_forward.cuh.
template <class S, Owned kOwned>
class Backward {
  using T = typename S::T;
  using SmemTile = Tile<T, S::kWidth>;
  using Exchange = Tile<T, S::kStreamRows>;
  static constexpr bool kOwnsQueries = kOwned == Owned::kQueries, kExchanges = S::kExchanges;
  // Rows of a streamed tile for which a warp computes p and ds, and the columns of its results.
  static constexpr int kWarpRows =
      S::kRecomputes ? S::kStreamRows : S::kStreamRows / S::kColumnWarps;
  static constexpr int kWarpColumns = S::kWidth / S::kColumnWarps;

  const SmemTile a_, b_;  // owned rows: q and dO, or k and v
  const Exchange p_, ds_;
  const float *lses_, *deltas_;
  const int tokens_;
  const int first_;       // the block's first owned row, in the head
  const int row_;         // the warp's first owned row, in the block
  const int stream_row_;  // the warp's first row of a streamed tile
  const int column_;      // the warp's first column of the results
  const float scale_;
  Fragment<T> owned_fragments_[2][S::kKeepsOwned ? S::kWarpTiles : 1]
                              [S::kKeepsOwned ? S::kWidth / 16 : 1];
  float da_[S::kWarpTiles][kWarpColumns / 8][4] = {};                     // gradient of a: dq or dk
  float db_[kOwnsQueries ? 1 : S::kWarpTiles][kWarpColumns / 8][4] = {};  // gradient of b: dv
  float lse_[S::kWarpTiles][2], delta_[S::kWarpTiles][2];                 // of owned queries

 public:
  __device__ Backward(const SmemTile& a, const SmemTile& b, T* exchange, const float* lses,
                      const float* deltas, int tokens, int width, int first)
      : a_(a),
        b_(b),
        p_{exchange + S::kRows * S::kStreamRows},
        ds_{exchange},
        lses_(lses),
        deltas_(deltas),
        tokens_(tokens),
        first_(first),
        row_(static_cast<int>(threadIdx.x) / 32 % S::kRowWarps * 16 * S::kWarpTiles),
        stream_row_(!kExchanges ? 0
                                : static_cast<int>(threadIdx.x) / 32 / S::kRowWarps * kWarpRows),
        column_(S::kColumnWarps > 1
                    ? static_cast<int>(threadIdx.x) / 32 / S::kRowWarps * kWarpColumns
                    : 0),
        scale_(1 / sqrtf(static_cast<float>(width))) {}

  __device__ bool has_rows() const { return first_ + row_ < tokens_; }

  // Loads owned rows and row statistics into registers, if they are kept there. Call after their
  // copies have arrived.
  __device__ void load_owned() {
    if constexpr (S::kKeepsOwned) {
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) {
#pragma unroll
        for (int k = 0; k < S::kWidth / 16; ++k) {
          owned_fragments_[0][m][k] = left_k_major<false>(a_, row_ + 16 * m, 16 * k);
          owned_fragments_[1][m][k] = left_k_major<false>(b_, row_ + 16 * m, 16 * k);
        }
      }
    }
    if constexpr (kOwnsQueries) {
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row_ + 16 * m + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
          lse_[m][half] = lses_[row];
          delta_[m][half] = deltas_[row];
        }
      }
    }
  }

  // Adds a tile of streamed rows c and d, starting at row `first`, to the results. kWhole: there is
  // no padding among these rows nor, if the block owns all keys, among its own rows. All threads
  // must call this.
  template <bool kWhole>
  __device__ void step(const SmemTile& c, const SmemTile& d, int first, const HeadRows<T>& dq) {
    float p[S::kWarpTiles][kWarpRows / 8][4] = {}, ds[S::kWarpTiles][kWarpRows / 8][4] = {};
    const bool any = has_rows() && (kWhole || first + stream_row_ < tokens_);
    if (any) {
      multiply_transposed<0, kWhole>(p, a_, c, first);
      multiply_transposed<1, kWhole>(ds, b_, d, first);
      softmax_gradient<kWhole>(p, ds, first);
    }
    if constexpr (kExchanges || kOwned == Owned::kAllKeys) {
      if (any && (!S::kRecomputes || column_ == 0)) {
#pragma unroll
        for (int m = 0; m < S::kWarpTiles; ++m) {
          store_accumulators(ds_, ds[m], row_ + 16 * m, stream_row_, 1, 1);
          if constexpr (kExchanges && !kOwnsQueries)
            store_accumulators(p_, p[m], row_ + 16 * m, stream_row_, 1, 1);
        }
      }
      __syncthreads();
    }
    if (has_rows()) {
#pragma unroll kExchanges ? kUnrolled < T, S::kStreamRows / 16> : S::kStreamRows / 16
      for (int n = 0; n < S::kStreamRows / 8; n += 2) {
        if (!kWhole && first + 8 * n >= tokens_) continue;
        accumulate(da_, ds, ds_, c, n);
        if constexpr (!kOwnsQueries) accumulate(db_, p, p_, d, n);
      }
    }
    if constexpr (kOwned == Owned::kAllKeys) compute_dq(first, dq);
  }

  // Writes the results to the shared memory of the owned rows, which no warp reads any more.
  __device__ void store() {
    if (!has_rows()) return;
#pragma unroll
    for (int m = 0; m < S::kWarpTiles; ++m) {
      store_accumulators(a_, da_[m], row_ + 16 * m, column_, scale_, scale_);
      if constexpr (!kOwnsQueries) store_accumulators(b_, db_[m], row_ + 16 * m, column_, 1, 1);
    }
  }

 private:
  // accumulators += owned * other^T for this warp's part of the streamed rows.
  template <int kWhich, bool kWhole>
  __device__ void multiply_transposed(float (&accumulators)[S::kWarpTiles][kWarpRows / 8][4],
                                      const SmemTile& owned, const SmemTile& other, int first) {
#pragma unroll kUnrolled < T, S::kWidth / 16>
    for (int k = 0; k < S::kWidth / 16; ++k) {
      Fragment<T> left[S::kWarpTiles];
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) {
        if constexpr (S::kKeepsOwned) {
          left[m] = owned_fragments_[kWhich][m][k];
        } else {
          left[m] = left_k_major<false>(owned, row_ + 16 * m, 16 * k);
        }
      }
#pragma unroll
      for (int n = 0; n < kWarpRows / 8; n += 2) {
        if (!kWhole && first + stream_row_ + 8 * n >= tokens_) continue;
        const auto right = right_k_major(other, stream_row_ + 8 * n, 16 * k);
#pragma unroll
        for (int m = 0; m < S::kWarpTiles; ++m) multiply(&accumulators[m][n], left[m], right);
      }
    }
  }

  // Turns the logits in p into weights, and the gradients of the weights in ds into gradients of
  // the logits; both are zero for keys that are padding.
  template <bool kWhole>
  __device__ void softmax_gradient(float (&p)[S::kWarpTiles][kWarpRows / 8][4],
                                   float (&ds)[S::kWarpTiles][kWarpRows / 8][4], int first) {
    const int lane = threadIdx.x % 32;
    const float scale2 = scale_ * kLog2e;
#pragma unroll
    for (int n = 0; n < kWarpRows / 8; ++n) {
      const int other =
          stream_row_ + 8 * n + lane % 4 * 2;  // row of the tile; the next one follows
      float2 lse, delta;
      if constexpr (!kOwnsQueries) {
        lse = *reinterpret_cast<const float2*>(lses_ + (first % S::kSegment + other));
        delta = *reinterpret_cast<const float2*>(deltas_ + (first % S::kSegment + other));
      }
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float row_lse = kOwnsQueries ? lse_[m][i / 2] : i % 2 ? lse.y : lse.x;
          const float row_delta = kOwnsQueries ? delta_[m][i / 2] : i % 2 ? delta.y : delta.x;
          float weight = power_of_two(p[m][n][i] * scale2 - row_lse);
          if (kOwnsQueries && !kWhole && first + other + i % 2 >= tokens_) weight = 0;
          if (kOwned == Owned::kAllKeys && !kWhole &&
              row_ + 16 * m + lane / 4 + i / 2 * 8 >= tokens_)
            weight = 0;
          p[m][n][i] = weight;
          ds[m][n][i] = weight * (ds[m][n][i] - row_delta);
        }
      }
    }
  }

  // accumulators += weights * other, for columns [8 n, 8 n + 16) of the weights (p or ds), which
  // come from registers or from the exchange.
  template <class Accumulators>
  __device__ void accumulate(Accumulators& accumulators,
                             const float (&weights)[S::kWarpTiles][kWarpRows / 8][4],
                             const Exchange& exchange, const SmemTile& other, int n) {
    Fragment<T> left[S::kWarpTiles];
#pragma unroll
    for (int m = 0; m < S::kWarpTiles; ++m) {
      if constexpr (kExchanges) {
        left[m] = left_k_major<true>(exchange, row_ + 16 * m, 8 * n);
      } else {
        left[m] = left_from_accumulators<T>(&weights[m][n]);
      }
    }
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; j += 2) {
      const auto right = right_mn_major(other, column_ + 8 * j, 8 * n);
#pragma unroll
      for (int m = 0; m < S::kWarpTiles; ++m) multiply(&accumulators[m][j], left[m], right);
    }
  }

  // Writes dq = ds * k of the streamed queries; each warp takes 16 rows and a share of the columns.
  __device__ void compute_dq(int first, const HeadRows<T>& dq) {
    constexpr int kParts = S::kStreamRows / 16, kShare = S::kWidth / (S::kWarps / kParts);
    static_assert(kOwned != Owned::kAllKeys || (S::kWarps % kParts == 0 && kShare % 16 == 0),
                  "the warps divide the streamed rows and the columns of dq in 16 x 16");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp % kParts * 16,
              column = warp / kParts * kShare;
    if (first + row >= tokens_) return;
    float accumulators[kShare / 8][4] = {};
#pragma unroll
    for (int key = 0; key < S::kRows; key += 16) {
      if (key >= tokens_) continue;
      const auto left = left_mn_major(ds_, row, key);
#pragma unroll
      for (int j = 0; j < kShare / 8; j += 2)
        multiply(&accumulators[j], left, right_mn_major(a_, column + 8 * j, key));
    }
#pragma unroll
    for (int j = 0; j < kShare / 8; ++j) {
      const int d = column + 8 * j + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = first + row + lane / 4 + 8 * half;
        if (token < tokens_ && d < dq.width) {
          store_pair(dq.at(token, d), accumulators[j][2 * half] * scale_,
                     accumulators[j][2 * half + 1] * scale_);
        }
      }
    }
  }
};

}  // namespace jaxunet::cuda
