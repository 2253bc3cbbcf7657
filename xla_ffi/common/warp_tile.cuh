// Multiplies two tiles in shared memory with mma.sync: each warp computes 32 × 32 outputs over 32
// steps of K.
//
// A tile is K-major, [64][32 of K], or MN-major, [32 of K][64]. Its rows are padded so that a
// warp's reads have no bank conflicts.
//
// float32 numbers are split into two tf32 numbers, x = high + low, and multiplied as high · high +
// high · low + low · high; the relative error of a product is 2^-22. Tensor cores truncate their
// sums instead of rounding them, so the error grows with the number of products instead of its
// square root. Therefore tensor cores sum only within a tile, and float32 additions, which round,
// sum over the tiles: the result is as accurate as float32 arithmetic.
#pragma once

#include <cstring>

#include "common/warp_instructions.cuh"

namespace jaxunet::cuda {

constexpr int kTile = 64;   // rows and columns of a block's output; a side of a tile
constexpr int kDepth = 32;  // steps of K of a tile: its other side

// Elements from one row of a tile to the next, with padding: 8 elements if MN-major, else 16 bytes.
template <class T, bool kMnMajor>
constexpr int kStride = kMnMajor ? kTile + 8 : kDepth + 16 / sizeof(T);

// Elements of a buffer that fits a tile of either layout.
template <class T>
constexpr int kTileEntries =
    kTile * kStride<T, false> > kDepth* kStride<T, true> ? kTile * kStride<T, false>
                                                         : kDepth * kStride<T, true>;

// A lane's part of the 32 × 32 outputs: 2 × 4 fragments of 16 rows × 8 columns.
using Accumulator = float[2][4][4];

// accumulator += left · right. `left` holds 64 rows of A, `right` 64 columns of B; the warp
// multiplies the 32 rows from `row` on by the 32 columns from `column` on.
template <bool kLeftMnMajor, bool kRightMnMajor, class T>
__device__ void multiply_tiles(Accumulator& accumulator, const T* left, const T* right, int row,
                               int column) {
  constexpr int left_stride = kStride<T, kLeftMnMajor>, right_stride = kStride<T, kRightMnMajor>;
  // ldmatrix reads four 8 × 8 matrices; this lane gives the address of one row of one of them.
  const int lane = threadIdx.x % 32, matrix_row = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = row + 16 * i + matrix % 2 * 8, depth = k + matrix / 2 * 8;
      ldmatrix_x4<kLeftMnMajor>(a[i],
                                left + (kLeftMnMajor ? (depth + matrix_row) * left_stride + m
                                                     : (m + matrix_row) * left_stride + depth));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = column + 16 * j + matrix / 2 * 8, depth = k + matrix % 2 * 8;
      ldmatrix_x4<kRightMnMajor>(b[j],
                                 right + (kRightMnMajor ? (depth + matrix_row) * right_stride + n
                                                        : (n + matrix_row) * right_stride + depth));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mma_m16n8k16(accumulator[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
    }
  }
}

// x as the sum of two tf32 numbers.
struct Tf32Pair {
  uint32_t high, low;
  __device__ explicit Tf32Pair(float x) : high(tf32(x)) {
    float rounded;
    memcpy(&rounded, &high, sizeof(rounded));
    low = tf32(x - rounded);
  }
};

template <bool kLeftMnMajor, bool kRightMnMajor>
__device__ void multiply_tiles(Accumulator& accumulator, const float* left, const float* right,
                               int row, int column) {
  constexpr int left_stride = kStride<float, kLeftMnMajor>,
                right_stride = kStride<float, kRightMnMajor>;
  // In PTX's terms: groupID and threadID_in_group.
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Accumulator tile{};  // sums over this tile only
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int m = row + 16 * i + g + n % 2 * 8, depth = k + t + n / 2 * 4;
        const Tf32Pair pair(left[kLeftMnMajor ? depth * left_stride + m : m * left_stride + depth]);
        high[i][n] = pair.high;
        low[i][n] = pair.low;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t right_high[2], right_low[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column_of_b = column + 8 * j + g, depth = k + t + n * 4;
        const Tf32Pair pair(right[kRightMnMajor ? depth * right_stride + column_of_b
                                                : column_of_b * right_stride + depth]);
        right_high[n] = pair.high;
        right_low[n] = pair.low;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k8(tile[i][j], low[i], right_high);
        mma_m16n8k8(tile[i][j], high[i], right_low);
        mma_m16n8k8(tile[i][j], high[i], right_high);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) accumulator[i][j][n] += tile[i][j][n];
    }
  }
}

// Calls visit(row, column, value, value of the next column) for this lane's outputs. `row`,
// `column`: position of the warp's first output.
template <class Visit>
__device__ void each_pair(const Accumulator& accumulator, int row, int column, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(row + 16 * i + lane / 4 + 8 * half, column + 8 * j + lane % 4 * 2,
              accumulator[i][j][2 * half], accumulator[i][j][2 * half + 1]);
      }
    }
  }
}

}  // namespace jaxunet::cuda
