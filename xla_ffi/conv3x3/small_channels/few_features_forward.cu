// Forward 3×3 convolution to at most eight features, which is also the input gradient of a
// convolution of at most eight channels.
//
// mma.sync computes pixels × features with N = 8; K runs over taps and channels. A tile of 16 × 16
// pixels with its halo lies in shared memory, 64 channels at a time. Each of four warps computes
// four rows of 16 pixels from six rows of the tile: a fragment of 16 pixels, loaded at one of three
// column offsets, serves the output rows above, at and below it. A pixel is thus loaded from shared
// memory three times instead of nine.
//
// Blocks are persistent and process one tile after another. There is no pipeline: the four blocks
// on a multiprocessor overlap the copies of one with the products of another. Two __syncthreads per
// chunk: one after it has been copied (and activated), one after it has been read.
//
// Shared memory: a haloed tile of 64 channels, swizzled (common.cuh); all weights, as fragments.

#include <algorithm>

#include "common/kernel_set.h"
#include "common/launch.cuh"
#include "common/warp_instructions.cuh"
#include "conv3x3/activation.cuh"
#include "conv3x3/kernels.h"
#include "conv3x3/small_channels/common.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 128, kBlocks = 4;  // blocks on a multiprocessor
using Tiles = Tiling<16, 16>;
constexpr int kWarpRows = 4, kSteps = kWide / 16;  // a step is 16 channels
constexpr int kTileBytes = Tiles::kHaloPixels * kWide * 2;
constexpr int kWeightBytes = 9 * kSteps * 32 * 8;  // per chunk; 8 bytes per lane
static_assert(kTileBytes + kMaxChannelsToFew / kWide * kWeightBytes <= kAdaSmemBytes,
              "a tile and the weights of the most channels fit a block of every GPU");

struct Parameters {
  Channels x;
  int chunks, features;
  Weights weights;
  Tiles tiling;
  Rows shift, a, b;
  void* y;
};

template <class T>
struct Block {
  const Parameters& p;
  unsigned char *pixels, *weights;

  __device__ Block(const Parameters& parameters, unsigned char* shared)
      : p(parameters), pixels(shared), weights(shared + kTileBytes) {}

  // Starts copying a chunk of a tile.
  __device__ void load(int tile, int number) const {
    const auto at = p.tiling.at(tile);
    const Chunk chunk = Chunk::of(p.x, number);
    const int eighth = threadIdx.x % 8, channel = chunk.channel + 8 * eighth;
    const auto* image = static_cast<const T*>(p.x.data[chunk.part]);
    for (int pixel = threadIdx.x / 8; pixel < Tiles::kHaloPixels; pixel += kThreads / 8) {
      const int row = at.row - 1 + pixel / Tiles::kHaloColumns,
                column = at.column - 1 + pixel % Tiles::kHaloColumns;
      const bool there = p.tiling.inside(row, column) && channel < chunk.width;
      const T* from = image + p.tiling.index(at.sample, row, column) * chunk.width + channel;
      cp_async_16(pixels + swizzled(pixel, eighth), there ? from : image, there);
    }
  }

  // Each thread activates what it copied.
  __device__ void activate(int tile, int number) const {
    const auto at = p.tiling.at(tile);
    const Chunk chunk = Chunk::of(p.x, number);
    const int eighth = threadIdx.x % 8;
    if (chunk.channel + 8 * eighth >= chunk.width) return;
    const ActivationCoefficients coefficients(p.a, p.b, at.sample, chunk.first + 8 * eighth, true);
    for (int pixel = threadIdx.x / 8; pixel < Tiles::kHaloPixels; pixel += kThreads / 8) {
      const int row = at.row - 1 + pixel / Tiles::kHaloColumns,
                column = at.column - 1 + pixel % Tiles::kHaloColumns;
      if (!p.tiling.inside(row, column)) continue;  // stays zero
      auto* here = reinterpret_cast<T*>(pixels + swizzled(pixel, eighth));
      Eight<T> values;
      values.load(here);
      coefficients.apply(values, true);
      values.store(here);
    }
  }

  // Stores the weights as right fragments of mma.sync, [chunk][tap][step][lane]: a lane has
  // channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the step for feature lane / 4, where t = lane % 4.
  __device__ void load_weights() const {
    for (int number = 0; number < p.chunks; ++number) {
      const Chunk chunk = Chunk::of(p.x, number);
      // A warp loads one step of every tap, three taps at a time.
      const int lane = threadIdx.x % 32, step = threadIdx.x / 32, feature = lane / 4;
      static_assert(kThreads == 32 * kSteps, "one warp for each step");
#pragma unroll 3
      for (int tap = 0; tap < 9; ++tap) {
        SmallPixel<T, 4> four;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = 16 * step + lane % 4 * 2 + i % 2 + i / 2 * 8;
          const bool there = chunk.channel + c < chunk.width && feature < p.features;
          four.at[i] = there ? p.weights.at<T>(tap, chunk.first + c, feature) : narrow<T>(0.0f);
        }
        reinterpret_cast<SmallPixel<T, 4>*>(
            weights + number * kWeightBytes)[tap * kThreads + threadIdx.x] = four;
      }
    }
  }

  // sums += all taps of a chunk.
  __device__ void multiply(int number, float (&sums)[kWarpRows][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      uint2 right[9];
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) {
        right[tap] = reinterpret_cast<const uint2*>(
            weights + number * kWeightBytes)[(tap * kSteps + s) * 32 + lane];
      }
#pragma unroll
      for (int row = 0; row < kWarpRows + 2; ++row) {
#pragma unroll
        for (int dx = 0; dx < 3; ++dx) {
          const int pixel = (kWarpRows * warp + row) * Tiles::kHaloColumns + dx + lane % 16;
          uint32_t left[4];
          ldmatrix_x4<false>(left, pixels + swizzled(pixel, 2 * s + lane / 16));
#pragma unroll
          for (int dy = 0; dy < 3; ++dy) {
            if (row - dy < 0 || row - dy >= kWarpRows) continue;
            mma_m16n8k16(sums[row - dy], left, right[3 * dy + dx].x, right[3 * dy + dx].y, T());
          }
        }
      }
    }
  }

  // Adds the shift and stores y.
  __device__ void finish(int tile, const float (&sums)[kWarpRows][4]) const {
    const auto at = p.tiling.at(tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* shift = p.shift.data + at.sample * p.shift.stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int feature = lane % 4 * 2 + i % 2, column = at.column + lane / 4 + i / 2 * 8;
      if (feature >= p.features) continue;
#pragma unroll
      for (int down = 0; down < kWarpRows; ++down) {
        const int row = at.row + kWarpRows * warp + down;
        if (!p.tiling.inside(row, column)) continue;
        const int64_t entry = p.tiling.index(at.sample, row, column) * p.features + feature;
        static_cast<T*>(p.y)[entry] = narrow<T>(sums[down][i] + shift[feature]);
      }
    }
  }

  __device__ void run() const {
    bool first = true;
    for (int tile = blockIdx.x; tile < p.tiling.tiles; tile += gridDim.x) {
      float sums[kWarpRows][4] = {};
      for (int number = 0; number < p.chunks; ++number) {
        load(tile, number);
        if (first) load_weights();  // while the first chunk is copied
        first = false;
        cp_async_wait_all();
        if (p.a.data) activate(tile, number);
        __syncthreads();
        multiply(number, sums);
        __syncthreads();
      }
      finish(tile, sums);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    few_features_forward_kernel(const Parameters p) {
  Block<T>(p, shared_memory()).run();
}

template <class T>
cudaError_t run(const Parameters& p, int multiprocessors, cudaStream_t stream) {
  const auto kernel = few_features_forward_kernel<T>;
  const int bytes = kTileBytes + p.chunks * kWeightBytes;
  const cudaError_t error = allow_shared_memory(kernel, bytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(std::min(p.tiling.tiles, kBlocks * multiprocessors)), kThreads, bytes,
                stream, p);
}

}  // namespace

cudaError_t few_features_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream) {
  const int channels = static_cast<int>(plan.x.total), features = static_cast<int>(plan.features);
  const Parameters p{channels_of(plan.x),
                     static_cast<int>(chunks_of(plan.x)),
                     features,
                     {plan.kernel, channels, features, plan.flipped},
                     Tiles(plan),
                     plan.shift,
                     plan.a,
                     plan.b,
                     plan.y.data[0]};
  if (p.tiling.tiles == 0 || features == 0) return cudaSuccess;
  return plan.type == Type::kFloat16 ? run<__half>(p, multiprocessors, stream)
                                     : run<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace jaxunet::cuda
