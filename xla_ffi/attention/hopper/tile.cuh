// Shared by the Hopper attention kernels: rows of heads in shared memory in the layout that wgmma
// reads, and operations on a warpgroup's accumulators.
//
// A tile holds rows of one head, kWidth 16-bit numbers each, as TMA writes them: rows of 64 or 128
// bytes, whose 16-byte chunks are swizzled over the row. One descriptor serves both ways in which
// wgmma can read it: K-major, with the channels as K, and MN-major, with the rows as K. Only a flag
// of the instruction and the step along K differ.
//
// Accumulators have the layout of wgmma (common/wgmma.cuh): in each 64 x 8 block, a thread holds
// two adjacent columns of row 16 * warp + lane / 4 and of the row 8 below it (`half` = 0, 1).
#pragma once

#include "attention/flash_tile.cuh"
#include "common/fast_divmod.h"
#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"

namespace jaxunet::cuda::hopper_attention {

constexpr int kWarpgroup = 128;  // threads per warpgroup
constexpr int kTileRows = 64;    // rows of a warpgroup's tile: wgmma's M

// The arrays that the backward kernels load in addition to q, k and v (Qkv, plan.h).
enum Unpacked : int { kGrad = 3, kOut = 4 };

// Rows of 32 or 64 channels. Wider heads are cut into tiles of 64.
template <int kWidth>
struct HeadTile {
  static_assert(kWidth == 32 || kWidth == 64, "rows of 64 or 128 bytes, as TMA swizzles them");
  static constexpr int kRowBytes = 2 * kWidth, kAtomBytes = 8 * kRowBytes;  // atom: of the swizzle

  // The descriptor of the rows at `address`, a multiple of kAtomBytes. The bits are as in
  // smem_descriptor (common/wgmma.cuh), which has only the 128-byte swizzle.
  static __device__ uint64_t descriptor(uint32_t address) {
    constexpr uint64_t swizzle64 = 2, swizzle128 = 1;
    constexpr uint64_t swizzle = kWidth == 32 ? swizzle64 : swizzle128;
    return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(kAtomBytes >> 4) << 32 | swizzle << 62;
  }
  // Bytes from one step of K (16) to the next.
  static constexpr int kKMajorStep = 32, kMnMajorStep = 16 * kRowBytes;

  // The address of a 16-byte chunk of a row.
  static __device__ uint32_t chunk(uint32_t address, int row, int chunk) {
    constexpr int kWays = kRowBytes / 16;
    return address + row * kRowBytes + (chunk ^ (row * kWays / 8 % kWays)) * 16;
  }
};

// Loads the left operands of a product over the channels: the warp's rows [row, row + 16).
template <int kWidth>
__device__ inline void load_left(uint32_t (&out)[kWidth / 16][4], uint32_t address, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k)
    ldmatrix_x4<false>(out[k],
                       HeadTile<kWidth>::chunk(address, row + lane % 16, 2 * k + lane / 16));
}

// Rounds an accumulator and turns it into the left operands of a product over its columns.
template <class T, int kColumns>
__device__ inline void left_from_accumulator(uint32_t (&out)[kColumns / 16][4],
                                             const float (&accumulator)[kColumns / 2]) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[k][i] = pack(accumulator[8 * k + 2 * i], accumulator[8 * k + 2 * i + 1], T());
  }
}

// Transposes the 4 × 4 words of four adjacent lanes: afterwards word i of lane q is the former word
// q of lane i.
__device__ inline void transpose_quad(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
    if (odd) {
      words[i] = other;
    } else {
      words[i + 1] = other;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, high ? words[i] : words[i + 2], 2);
    if (high) {
      words[i] = other;
    } else {
      words[i + 2] = other;
    }
  }
}

// Writes an accumulator, 64 rows of kWidth channels, to global memory, 16 bytes per thread and
// store. `to`: the tile's first row; rows are `stride` elements apart. Rows 0-7 of each warp's 16
// are multiplied by `top`, the others by `bottom`.
template <int kWidth, class T>
__device__ inline void write_rows(T* to, int stride, const float (&accumulator)[kWidth / 2],
                                  float top, float bottom) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = half ? bottom : top;
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * group + i) + 2 * half;
        words[i] = pack(accumulator[at] * scale, accumulator[at + 1] * scale, T());
      }
      transpose_quad(words);
      *reinterpret_cast<uint4*>(to + (row + 8 * half) * stride + 32 * group + lane % 4 * 8) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// log2(e) / sqrt(kWidth): the factor from q * k^T to the logits in base two.
template <int kWidth>
constexpr float kScale2 = kLog2e / (kWidth == 32   ? 5.656854249492381f
                                    : kWidth == 64 ? 8.0f
                                                   : 16.0f);

// Multiplies each of the two rows of a thread's accumulator by its factor.
template <int kCount>
__device__ inline void scale_rows(float (&accumulator)[kCount], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulator[i] *= by[i / 2 % 2];
}

// One step of the online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), for one of the
// thread's two rows: raises `max`, the largest s = q * k^T of the row so far. Sets `rescale`, the
// factor for sums of earlier weights, and returns what the logits subtract.
template <int kColumns>
__device__ inline float raise_max(const float (&s)[kColumns / 2], int half, float scale2,
                                  float& max, float& rescale) {
  float new_max = max;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
    new_max = fmaxf(new_max, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
  new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, 1));
  new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, 2));
  const float base = new_max * scale2;
  rescale = power_of_two(max * scale2 - base);
  max = new_max;
  return base;
}

// Turns s = q * k^T, 64 rows of kColumns, into weights relative to `max`, the largest s of the row
// so far. Adds this thread's weights to `sum`. The caller multiplies its earlier sums by `rescale`.
// max, sum and rescale belong to the thread's two rows.
template <int kColumns>
__device__ inline void online_softmax(float (&s)[kColumns / 2], float scale2, float (&max)[2],
                                      float (&sum)[2], float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = raise_max<kColumns>(s, half, scale2, max[half], rescale[half]);
    float part[2] = {};
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& logit = s[4 * j + 2 * half + i];
        logit = power_of_two(logit * scale2 - base);
        part[i] += logit;
      }
    }
    sum[half] = sum[half] * rescale[half] + (part[0] + part[1]);
  }
}

// Completes the sums over the lanes of a row, and writes log_sum_exp(max, sum) of 64 rows to `lse`.
template <class LogSumExp>
__device__ void write_lse(float* lse, const float (&max)[2], float (&sum)[2],
                          const LogSumExp& log_sum_exp) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 2);
    if (lane % 4 == 0) lse[row + 8 * half] = log_sum_exp(max[half], sum[half]);
  }
}

// Where a head's rows lie: its sample, and its first channel in out, which is also its first
// channel in q.
struct Place {
  int sample, channel;

  __device__ Place(int head, int heads, int width)
      : sample(head / heads), channel((head - sample * heads) * width) {}
  __device__ Place(int head, const FastDivmod& by_heads, int width)
      : sample(by_heads.quotient(head)), channel(by_heads.remainder(head, sample) * width) {}
};

}  // namespace jaxunet::cuda::hopper_attention
