// Tiles in shared memory, and the fragments that a warp loads from them for the tensor cores
// (mma.sync m16n8k16, or m16n8k8 in tf32).
//
// A tile holds rows of one head, padded with zeros to a width of 32, 64, 128 or 256. Its 16-byte
// chunks are permuted within a row (swizzled), so that a warp's loads have no bank conflicts.
//
// An operand is K-major if K of the product runs along a row of its tile, and MN-major if K runs
// from row to row: in q * k^T both operands are K-major, in p * v the right operand is MN-major.
//
// A float32 product is computed as three tf32 products (warp_tile.cuh). ldmatrix cannot transpose
// float32, so MN-major operands take K in the order 0 2 4 6 1 3 5 7. A product's accumulators are
// already in this order, so they can be the left operand of the next product without a change. A
// left operand that is loaded from memory for such a product must use the same order (kPaired).
#pragma once

#include "common/special_functions.cuh"
#include "common/types.cuh"
#include "common/warp_tile.cuh"
#include "plan.h"

namespace jaxunet::cuda {

// Unroll factor of loops over K whose indices need not be constants. For float32 the loop bodies
// are long and not unrolled.
template <class T, int kSteps>
constexpr int kUnrolled = sizeof(T) == 2 ? kSteps : 1;

// A swizzled tile, [rows][kWidth]. Chunk c of row r is stored at chunk c ^ (r / kRowsPerWay %
// kWays) of its row, so that the eight rows that ldmatrix reads at one column begin in eight
// different groups of four banks.
template <class T, int kWidth>
struct Tile {
  static constexpr int kChunk = 16 / sizeof(T);            // elements per chunk
  static constexpr int kChunks = kWidth / kChunk;          // chunks per row
  static constexpr int kWays = kChunks < 8 ? kChunks : 8;  // number of permutations
  // Consecutive rows with the same permutation: as many short rows as fill the 32 banks.
  static constexpr int kRowsPerWay = 8 / kWays;
  T* data;

  __device__ T* at(int row, int column) const {
    return data + row * kWidth + (column / kChunk ^ row / kRowsPerWay % kWays) * kChunk +
           column % kChunk;
  }
};

// A lane's part of a 16 x 16 operand.
template <class T>
struct Fragment {
  uint32_t at[4];
};
template <>
struct Fragment<float> {
  float at[8];
};

// Loads the left operand, rows [row, row + 16) and K [k, k + 16), from a K-major tile.
template <bool kPaired, class T, int kWidth>
__device__ Fragment<T> left_k_major(const Tile<T, kWidth>& tile, int row, int k) {
  Fragment<T> out;
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4<false>(out.at, tile.at(row + lane % 16, k + lane / 16 * 8));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int pair = kPaired ? 2 * (lane % 4) + i % 4 / 2 : lane % 4 + i % 4 / 2 * 4;
      out.at[i] = *tile.at(row + lane / 4 + i % 2 * 8, k + i / 4 * 8 + pair);
    }
  }
  return out;
}

// The same from an MN-major tile, where they are rows [k, k + 16) and columns [row, row + 16).
template <class T, int kWidth>
__device__ Fragment<T> left_mn_major(const Tile<T, kWidth>& tile, int row, int k) {
  Fragment<T> out;
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4<true>(out.at, tile.at(k + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out.at[i] = *tile.at(k + i / 4 * 8 + 2 * (lane % 4) + i % 4 / 2, row + lane / 4 + i % 2 * 8);
    }
  }
  return out;
}

// Loads the right operand, columns [column, column + 16) and K [k, k + 16), from a K-major tile,
// whose rows are the operand's columns.
template <class T, int kWidth>
__device__ Fragment<T> right_k_major(const Tile<T, kWidth>& tile, int column, int k) {
  Fragment<T> out;
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4<false>(out.at, tile.at(column + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out.at[i] = *tile.at(column + i / 4 * 8 + lane / 4, k + i % 4 / 2 * 8 + lane % 4 + i % 2 * 4);
    }
  }
  return out;
}

// The same from an MN-major tile, where they are rows [k, k + 16) and columns [column, column +
// 16).
template <class T, int kWidth>
__device__ Fragment<T> right_mn_major(const Tile<T, kWidth>& tile, int column, int k) {
  Fragment<T> out;
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4<true>(out.at, tile.at(k + lane % 16, column + lane / 16 * 8));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out.at[i] =
          *tile.at(k + i % 4 / 2 * 8 + 2 * (lane % 4) + i % 2, column + i / 4 * 8 + lane / 4);
    }
  }
  return out;
}

// Rounds two numbers to the type of the last argument and packs them.
__device__ inline uint32_t pack(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  uint32_t out;
  memcpy(&out, &pair, sizeof(out));
  return out;
}
__device__ inline uint32_t pack(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  uint32_t out;
  memcpy(&out, &pair, sizeof(out));
  return out;
}

// Turns two accumulators, 16 x 8 and the next 8 columns, into the left operand of a product whose
// right operand is MN-major.
template <class T>
__device__ Fragment<T> left_from_accumulators(const float (*accumulators)[4]) {
  Fragment<T> out;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if constexpr (sizeof(T) == 2) {
      out.at[2 * j] = pack(accumulators[j][0], accumulators[j][1], T());
      out.at[2 * j + 1] = pack(accumulators[j][2], accumulators[j][3], T());
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out.at[4 * j + i] = accumulators[j][i % 2 * 2 + i / 2];
    }
  }
  return out;
}

// Adds left * right to two accumulators, 16 x 8 and the next 8 columns.
template <class T>
__device__ void multiply(float (*accumulators)[4], const Fragment<T>& left,
                         const Fragment<T>& right) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
    mma_m16n8k16(accumulators[j], left.at, right.at[2 * j], right.at[2 * j + 1], T());
}
// float32: tensor cores truncate their sums, so they add up only 16 steps of K; additions that
// round do the rest.
template <>
__device__ inline void multiply(float (*accumulators)[4], const Fragment<float>& left,
                                const Fragment<float>& right) {
  float part[2][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Tf32Pair pair(left.at[4 * k + i]);
      high[i] = pair.high;
      low[i] = pair.low;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Tf32Pair first(right.at[4 * j + 2 * k]), second(right.at[4 * j + 2 * k + 1]);
      const uint32_t right_high[2] = {first.high, second.high},
                     right_low[2] = {first.low, second.low};
      mma_m16n8k8(part[j], low, right_high);
      mma_m16n8k8(part[j], high, right_low);
      mma_m16n8k8(part[j], high, right_high);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) accumulators[j][i] += part[j][i];
  }
}

// Stores two adjacent elements, the first at an even column.
template <class T>
__device__ void store_pair(T* to, float a, float b) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(to) = pack(a, b, T());
  } else {
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  }
}

// Stores accumulators at rows [row, row + 16) and columns from `column` on, with the first 8 rows
// multiplied by `top` and the others by `bottom`.
template <int kBlocks, class T, int kWidth>
__device__ void store_accumulators(const Tile<T, kWidth>& tile,
                                   const float (&accumulators)[kBlocks][4], int row, int column,
                                   float top, float bottom) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    store_pair(tile.at(row + lane / 4, column + 8 * j + lane % 4 * 2), accumulators[j][0] * top,
               accumulators[j][1] * top);
    store_pair(tile.at(row + lane / 4 + 8, column + 8 * j + lane % 4 * 2),
               accumulators[j][2] * bottom, accumulators[j][3] * bottom);
  }
}

// One head's rows of q, k, v, out or a gradient in global memory; `stride` elements apart.
template <class T>
struct HeadRows {
  T* data;
  int stride, tokens, width;

  __device__ T* at(int row, int column) const { return data + (row * stride + column); }
};

// The head that a block works on, and where its rows lie.
template <class Plan>
struct Head {
  const Plan& plan;
  int64_t index;  // sample * heads + head

  // q, k or v of the packed array.
  template <class T>
  __device__ HeadRows<T> packed(T* qkv, Qkv which) const {
    const int64_t channels = plan.heads * plan.width, sample = index / plan.heads,
                  head = index % plan.heads;
    return {qkv + (sample * plan.tokens * 3 + which) * channels + head * plan.width,
            static_cast<int>(3 * channels), static_cast<int>(plan.tokens),
            static_cast<int>(plan.width)};
  }
  // out, or its gradient.
  template <class T>
  __device__ HeadRows<T> unpacked(T* x) const {
    const int64_t channels = plan.heads * plan.width, sample = index / plan.heads,
                  head = index % plan.heads;
    return {x + sample * plan.tokens * channels + head * plan.width, static_cast<int>(channels),
            static_cast<int>(plan.tokens), static_cast<int>(plan.width)};
  }
};

// Calls visit(row, column) for this thread's share of the 16-byte chunks of kRows rows; a thread's
// column is the same in every call.
template <int kRows, int kThreads, class TileType, class Visit>
__device__ void each_chunk(Visit visit) {
  constexpr int step = kThreads / TileType::kChunks;
  static_assert(kThreads % TileType::kChunks == 0 && kRows % step == 0,
                "the threads take whole rows, and all rows in equal steps");
  const int row = threadIdx.x / TileType::kChunks,
            column = threadIdx.x % TileType::kChunks * TileType::kChunk;
#pragma unroll
  for (int i = 0; i < kRows; i += step) visit(row + i, column);
}

// Starts to copy rows [first, first + kRows), with zeros beyond the tokens and the width. 16 rows
// that are all beyond the tokens are not written at all, because no product reads them.
template <int kRows, int kThreads, class T, int kWidth>
__device__ void fetch(const Tile<T, kWidth>& tile, const HeadRows<const T>& from, int first) {
  each_chunk<kRows, kThreads, Tile<T, kWidth>>([&](int row, int column) {
    if (first + row / 16 * 16 >= from.tokens) return;
    const bool valid = first + row < from.tokens && column < from.width;
    cp_async_16(tile.at(row, column), valid ? from.at(first + row, column) : from.data, valid);
  });
}

// Writes rows [first, first + kRows), except those beyond the tokens.
template <int kRows, int kThreads, class T, int kWidth>
__device__ void write(const Tile<T, kWidth>& tile, const HeadRows<T>& to, int first) {
  each_chunk<kRows, kThreads, Tile<T, kWidth>>([&](int row, int column) {
    if (first + row < to.tokens && column < to.width) {
      *reinterpret_cast<uint4*>(to.at(first + row, column)) =
          *reinterpret_cast<const uint4*>(tile.at(row, column));
    }
  });
}

}  // namespace jaxunet::cuda
