// A warp's share of a product of two tiles in shared memory, 32 × 32 entries over 32 steps of K, on the tensor cores
// (mma.sync).
//
// A tile lies along K, as [64][32], or across it, as [32][64]; rows are padded so that a warp's reads meet no bank
// twice. float32 is multiplied as three tf32 products, x = high + low: high · high + high · low + low · high. What is
// left out is 2^-22 of a product; but tensor cores cut off the last bits of their sums instead of rounding them, an
// error that grows with the number of products rather than with its root. They sum one tile alone, and float32
// additions, which round, sum the tiles: the result is as near as that of float32's own products and sums.
#pragma once

#include <cstring>

#include "common/warp_instructions.cuh"

namespace jaxunet::cuda {

constexpr int kTile = 64;   // rows and columns of a block's tile
constexpr int kDepth = 32;  // steps of K that a tile in shared memory holds

template <class T, bool kAcross>
constexpr int kStride = kAcross ? kTile + 8 : kDepth + 16 / sizeof(T);

template <class T>
constexpr int kTileEntries =
    kTile * kStride<T, false> > kDepth* kStride<T, true> ? kTile * kStride<T, false> : kDepth * kStride<T, true>;

using Sums = float[2][4][4];  // (16 rows, 8 columns) fragments

template <bool kLeftAcross, bool kRightAcross, class T>
__device__ void multiply_tiles(Sums& sums, const T* left, const T* right, int row, int column) {
  constexpr int left_stride = kStride<T, kLeftAcross>, right_stride = kStride<T, kRightAcross>;
  const int lane = threadIdx.x % 32, in_block = lane % 8, block = lane / 8;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = row + 16 * i + block % 2 * 8, depth = k + block / 2 * 8;
      ldmatrix_x4<kLeftAcross>(
          a[i], left + (kLeftAcross ? (depth + in_block) * left_stride + m : (m + in_block) * left_stride + depth));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = column + 16 * j + block / 2 * 8, depth = k + block % 2 * 8;
      ldmatrix_x4<kRightAcross>(
          b[j], right + (kRightAcross ? (depth + in_block) * right_stride + n : (n + in_block) * right_stride + depth));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
    }
  }
}

struct Terms {
  uint32_t high, low;
  __device__ explicit Terms(float x) : high(tf32(x)) {
    float rounded;
    memcpy(&rounded, &high, sizeof(rounded));
    low = tf32(x - rounded);
  }
};

template <bool kLeftAcross, bool kRightAcross>
__device__ void multiply_tiles(Sums& sums, const float* left, const float* right, int row, int column) {
  constexpr int left_stride = kStride<float, kLeftAcross>, right_stride = kStride<float, kRightAcross>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Sums tile{};
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int m = row + 16 * i + g + n % 2 * 8, depth = k + t + n / 2 * 4;
        const Terms terms(left[kLeftAcross ? depth * left_stride + m : m * left_stride + depth]);
        high[i][n] = terms.high;
        low[i][n] = terms.low;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t right_high[2], right_low[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int f = column + 8 * j + g, depth = k + t + n * 4;
        const Terms terms(right[kRightAcross ? depth * right_stride + f : f * right_stride + depth]);
        right_high[n] = terms.high;
        right_low[n] = terms.low;
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
      for (int n = 0; n < 4; ++n) sums[i][j][n] += tile[i][j][n];
    }
  }
}

// visit(row, column, sum of that entry and of the next column) for this lane's entries of the warp's 32 × 32.
template <class Visit>
__device__ void each_pair(const Sums& sums, int row, int column, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(row + 16 * i + lane / 4 + 8 * half, column + 8 * j + lane % 4 * 2, sums[i][j][2 * half],
              sums[i][j][2 * half + 1]);
      }
    }
  }
}

}  // namespace jaxunet::cuda
