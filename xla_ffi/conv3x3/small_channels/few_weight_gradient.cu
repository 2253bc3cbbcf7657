// Weight gradient of a 3×3 convolution of at most eight channels, or to at most eight features.
//
// One of the images x and dy is small (few channels), the other large. The gradient of a weight is
// the sum over the pixels of the large image of pixel times neighbour in the small image, which
// lies at + tap if x is small, at - tap if dy is small. The product has (tap, small channel) as
// rows and a chunk of 64 channels of the large image as columns; K runs over pixels and is split
// (split_k.h). A block iterates over the strips of its split, 8 columns × 16 rows of pixels, and
// multiplies with mma.sync. Each of its eight warps has a quarter of a strip (four rows: two steps
// of 16 pixels) and half of the columns. At the end the quarters are added in a fixed order. While
// a strip is multiplied, the next one is loaded into registers.
//
// Sums of dy need no separate pass: if x is small, a plane of ones adds a row to the product; if dy
// is small, the rows of the centre tap are also multiplied by ones.
//
// Shared memory: two stages of a strip: the large image pixel by pixel, swizzled (common.cuh); the
// small one with its halo, one plane per channel; and the plane of ones. At the end, the sums
// overwrite the stages. One __syncthreads per strip: its stage has been written, and the stage that
// the next strip overwrites has been read. Two more after the last strip of a sample, whose sums of
// dy go through shared memory; at the end, one before the first quarter is added and one after
// each. Grid: splits × chunks.

#include "common/launch.cuh"
#include "common/warp_instructions.cuh"
#include "conv3x3/kernels.h"
#include "conv3x3/small_channels/common.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 256;
using Strips = Tiling<16, 8>;
constexpr int kQuarters = 4, kHalves = 2;
constexpr int kColumns = kWide / kHalves, kFragments = kColumns / 8;  // per warp
constexpr int kLoads = Strips::kPixels * 8 / kThreads;  // of 16 bytes, per thread and strip
constexpr int kOnes = kFew;                             // the plane of ones

struct Parameters {
  Channels large;
  const void* small;
  int few;                 // channels of the small image
  int chunks;              // of the large image
  int channels, features;  // channels of x, features of dy
  Strips tiling;
  SplitK split_k;
  float* partials;
  ShiftPartials shift;
};

// kRowTiles: fragments of 16 rows, 2 for at most three small channels, else 5; kSmallX: x is the
// small image, else dy.
template <class T, int kRowTiles, bool kSmallX>
struct Block {
  static constexpr int kMaxFew = kRowTiles == 2 ? 3 : kFew, kRows = 16 * kRowTiles;
  static_assert(9 * kMaxFew < kRows, "the sums of dy need one row");

  struct Strip {
    alignas(1024) unsigned char large[Strips::kPixels * kWide * 2];
    T small[kFew + 1][Strips::kHaloPixels];
  };
  struct Shared {
    union {
      Strip strips[2];
      float sums[kRows][kWide];  // after the last strip
    };
    float shift[kQuarters][kWide];
    __device__ Shared() {}
  };

  const Parameters& p;
  Shared& shared;
  Chunk chunk;
  int split, first, count;        // the split, its first strip, its number of strips
  int warp, lane, quarter, half;  // quarter of the strip's pixels, half of the columns
  int small_at[kRowTiles][2];     // offsets in the planes of this lane's rows, relative to a pixel
  Eight<T> next_large[kLoads];
  T next_small[kMaxFew];
  float sums[kRowTiles][kFragments][4], small_sums[kRowTiles][4];

  __device__ Block(const Parameters& parameters, Shared& memory)
      : p(parameters),
        shared(memory),
        chunk(Chunk::of(p.large, blockIdx.x % p.chunks)),
        split(blockIdx.x / p.chunks),
        first(p.split_k.first(split)),
        count(p.split_k.count(split)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        quarter(warp % kQuarters),
        half(warp / kQuarters) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) small_at[i][n] = entry_of(16 * i + 8 * n + lane / 4);
      clear_shift(i);
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[i][j][n] = 0;
      }
    }
    for (int n = threadIdx.x; n < 2 * Strips::kHaloPixels; n += kThreads)
      shared.strips[n / Strips::kHaloPixels].small[kOnes][n % Strips::kHaloPixels] =
          narrow<T>(1.0f);
  }

  // The offset in the planes of the operand of a row at the first pixel of a strip. Rows past the
  // last compute numbers that nothing reads.
  __device__ int entry_of(int row) const {
    const int tap = row / p.few, plane = row - tap * p.few;
    if (tap >= 9) return row == 9 * p.few ? kOnes * Strips::kHaloPixels : 0;
    const int down = kSmallX ? tap / 3 : 2 - tap / 3, right = kSmallX ? tap % 3 : 2 - tap % 3;
    return plane * Strips::kHaloPixels + down * Strips::kHaloColumns + right;
  }

  // Loads a strip into registers.
  __device__ void load(int strip) {
    const auto at = p.tiling.at(strip);
    const int channel = chunk.channel + threadIdx.x % 8 * 8;
    const auto* large = static_cast<const T*>(p.large.data[chunk.part]);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int pixel = threadIdx.x / 8 + i * (kThreads / 8), row = at.row + pixel / 8,
                column = at.column + pixel % 8;
      next_large[i].clear();
      if (p.tiling.inside(row, column) && channel < chunk.width)
        next_large[i].load(large + p.tiling.index(at.sample, row, column) * chunk.width + channel);
    }
    const int pixel = threadIdx.x, row = at.row - 1 + pixel / Strips::kHaloColumns,
              column = at.column - 1 + pixel % Strips::kHaloColumns;
    const bool there = pixel < Strips::kHaloPixels && p.tiling.inside(row, column);
    const T* small =
        static_cast<const T*>(p.small) + p.tiling.index(at.sample, row, column) * p.few;
#pragma unroll
    for (int i = 0; i < kMaxFew; ++i)
      next_small[i] = there && i < p.few ? small[i] : narrow<T>(0.0f);
  }

  // Stores the registers that `load` filled to a stage of shared memory.
  __device__ void store(Strip& to) {
    const int eighth = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      next_large[i].store(
          reinterpret_cast<T*>(to.large + swizzled(threadIdx.x / 8 + i * (kThreads / 8), eighth)));
    if (threadIdx.x < Strips::kHaloPixels) {
#pragma unroll
      for (int i = 0; i < kMaxFew; ++i) to.small[i][threadIdx.x] = next_small[i];
    }
  }

  // Loads two adjacent numbers from an address that need not be a multiple of four bytes.
  __device__ static uint32_t pair(const T* from) {
    const T both[2] = {from[0], from[1]};
    uint32_t out;
    memcpy(&out, both, 4);
    return out;
  }

  // sums += the products of a strip's quarter.
  __device__ void multiply(const Strip& strip) {
    const T one[2] = {narrow<T>(1.0f), narrow<T>(1.0f)};
    uint32_t ones;
    memcpy(&ones, one, 4);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int row = 4 * quarter + 2 * step;  // and the next row: 16 pixels
      uint32_t right[kFragments / 2][4];
#pragma unroll
      for (int j = 0; j < kFragments / 2; ++j) {
        const int pixel = 8 * row + lane % 16, eighth = kFragments * half + 2 * j + lane / 16;
        ldmatrix_x4<true>(right[j], strip.large + swizzled(pixel, eighth));
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t left[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          left[n] = pair(&strip.small[0][small_at[i][n % 2] + (row + n / 2) * Strips::kHaloColumns +
                                         lane % 4 * 2]);
        }
#pragma unroll
        for (int j = 0; j < kFragments; ++j)
          mma_m16n8k16(sums[i][j], left, right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1], T());
        if constexpr (!kSmallX) {
          if (half == 0) mma_m16n8k16(small_sums[i], left, ones, ones, T());
        }
      }
    }
  }

  // --- sums of dy ---
  __device__ void clear_shift(int i) {
#pragma unroll
    for (int n = 0; n < 4; ++n) small_sums[i][n] = 0;
  }

  // All threads: stores the sums of dy over a sample whose last strip has been added.
  __device__ void store_shift(int sample) {
    const int first_row = kSmallX ? 9 * p.few : 4 * p.few, rows = kSmallX ? 1 : p.few;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = 16 * i + 8 * n + lane / 4 - first_row;
        if (row < 0 || row >= rows) continue;
        if constexpr (kSmallX) {
#pragma unroll
          for (int j = 0; j < kFragments; ++j) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              shared.shift[quarter][kColumns * half + 8 * j + lane % 4 * 2 + m] =
                  sums[i][j][2 * n + m];
              sums[i][j][2 * n + m] = 0;
            }
          }
        } else if (half == 0 && lane % 4 == 0) {
          shared.shift[quarter][row] = small_sums[i][2 * n];
        }
      }
      clear_shift(i);
    }
    __syncthreads();
    const int column = threadIdx.x, feature = kSmallX ? chunk.first + column : column;
    // If dy is small, all chunks have the same sums.
    if (kSmallX ? column < kWide && chunk.channel + column < chunk.width
                : column < p.few && chunk.first == 0) {
      float total = 0;
      for (int i = 0; i < kQuarters; ++i) total += shared.shift[i][column];
      p.shift.store(p.split_k, split, sample, feature, total);
    }
    __syncthreads();
  }

  // Adds the quarters in a fixed order and writes the partial result.
  __device__ void finish() {
    __syncthreads();
    for (int turn = 0; turn < kQuarters; ++turn) {
      if (quarter == turn) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int j = 0; j < kFragments; ++j) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              float& to = shared.sums[16 * i + lane / 4 + n / 2 * 8]
                                     [kColumns * half + 8 * j + lane % 4 * 2 + n % 2];
              to = turn ? to + sums[i][j][n] : sums[i][j][n];
            }
          }
        }
      }
      __syncthreads();
    }
    float* to = p.partials + static_cast<int64_t>(split) * 9 * p.channels * p.features;
    for (int n = threadIdx.x; n < 9 * p.few * kWide; n += kThreads) {
      const int row = kSmallX ? n / kWide : n / p.few / kWide * p.few + n % p.few;
      const int column = kSmallX ? n % kWide : n / p.few % kWide;
      if (chunk.channel + column >= chunk.width) continue;
      const int tap = row / p.few, small = row - tap * p.few, large = chunk.first + column;
      to[(static_cast<int64_t>(tap) * p.channels + (kSmallX ? small : large)) * p.features +
         (kSmallX ? large : small)] = shared.sums[row][column];
    }
  }

  __device__ void run() {
    load(first);
    int of_sample = -1;
    for (int i = 0; i < count; ++i) {
      Strip& strip = shared.strips[i % 2];
      store(strip);
      // One barrier per strip is enough: a thread stores to this stage again only after the next
      // barrier.
      __syncthreads();
      if (i + 1 < count) load(first + i + 1);
      const int sample = p.tiling.at(first + i).sample;
      if (sample != of_sample && of_sample >= 0) store_shift(of_sample);
      of_sample = sample;
      multiply(strip);
    }
    store_shift(of_sample);
    finish();
  }
};

template <class T, int kRowTiles, bool kSmallX>
__global__ void __launch_bounds__(kThreads, kRowTiles == 2 ? 2 : 1)
    few_weight_gradient_kernel(const Parameters p) {
  __shared__ typename Block<T, kRowTiles, kSmallX>::Shared shared;
  Block<T, kRowTiles, kSmallX>(p, shared).run();
}

template <class T, bool kSmallX>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  const auto kernel = p.few <= 3 ? few_weight_gradient_kernel<T, 2, kSmallX>
                                 : few_weight_gradient_kernel<T, 5, kSmallX>;
  return launch(kernel, dim3(p.chunks * p.split_k.splits), kThreads, 0, stream, p);
}

bool small_x(const Conv3x3WeightGradient& plan) {
  return weight_gradient_kernel(plan, false) == Kernel::kFewChannels;
}

// dy as an image of one part.
Parts parts_of_dy(const Conv3x3WeightGradient& plan) {
  Parts parts{1, {}, {}, plan.features};
  parts.data[0] = const_cast<void*>(plan.dy);
  parts.channels[0] = plan.features;
  return parts;
}

}  // namespace

WeightGradientTiling few_weight_gradient_tiling(const Conv3x3WeightGradient& plan) {
  const Strips tiling(plan);
  return {chunks_of(small_x(plan) ? parts_of_dy(plan) : plan.x),
          static_cast<int64_t>(tiling.down) * tiling.across};
}

cudaError_t few_weight_gradient(const Conv3x3WeightGradient& plan, const SplitK& split_k,
                                float* partials, const ShiftPartials& shift, cudaStream_t stream) {
  const bool x = small_x(plan);
  const Parts large = x ? parts_of_dy(plan) : plan.x;
  const Parameters p{channels_of(large),
                     x ? plan.x.data[0] : plan.dy,
                     static_cast<int>(x ? plan.x.total : plan.features),
                     static_cast<int>(chunks_of(large)),
                     static_cast<int>(plan.x.total),
                     static_cast<int>(plan.features),
                     Strips(plan),
                     split_k,
                     partials,
                     shift};
  if (plan.type == Type::kFloat16)
    return x ? run<__half, true>(p, stream) : run<__half, false>(p, stream);
  return x ? run<__nv_bfloat16, true>(p, stream) : run<__nv_bfloat16, false>(p, stream);
}

}  // namespace jaxunet::cuda
