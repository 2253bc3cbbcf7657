// Forward 3×3 convolution of at most eight channels, which is also the input gradient of a
// convolution with at most eight features.
//
// mma.sync computes A · B: A has pixels as rows and (tap, channel), which is K, as columns; B, the
// weights, has features as columns. Channels are padded with zeros to four or eight, also in shared
// memory. K may be in any order that A and B share: here the four numbers of a row that a lane
// holds are four channels of one tap, so they are a single load. The features may be in any order
// as well: here a lane gets eight adjacent features and stores them as 16 bytes.
//
// A block has a chunk of 64 features and keeps their weights in registers. It is persistent and
// processes one tile of 32 × 8 pixels after another: each of its eight warps computes four rows of
// eight pixels, two rows at a time. While it multiplies a tile, it loads the next one into
// registers.
//
// Shared memory: two stages of haloed pixels and of the shift; the weights, before the first tile.
// One __syncthreads per tile: its stage has been written, and the stage that the next tile
// overwrites has been read. Grid: (blocks, chunks of features).

#include <algorithm>

#include "common/launch.cuh"
#include "common/warp_instructions.cuh"
#include "conv3x3/kernels.h"
#include "conv3x3/small_channels/common.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 256;
// Concurrent blocks per multiprocessor, which bounds the registers. The weights of eight channels
// take too many registers for a second block.
template <int kChannels>
constexpr int kBlocks = kChannels == 4 ? 2 : 1;
using Tiles = Tiling<32, 8>;

struct Parameters {
  const void* x;
  int channels, features;
  Weights weights;
  Tiles tiling;
  Rows shift;
  void* y;
};

template <class T, int kChannels>
struct Block {
  static constexpr int kTapsOfStep = 16 / kChannels;  // a step is 16 columns of K
  static constexpr int kSteps = (9 + kTapsOfStep - 1) / kTapsOfStep;
  // Pixels that one thread loads.
  static constexpr int kLoads = (Tiles::kHaloPixels + kThreads - 1) / kThreads;
  // A feature's weights in shared memory, padded so that a warp's reads have no bank conflicts.
  static constexpr int kColumns = 16 * kSteps + 4;
  static constexpr int kGroups = kWide / 32;  // groups of 32 features: four fragments of eight

  struct Shared {
    SmallPixel<T, kChannels> pixels[2][Tiles::kHaloPixels];
    alignas(16) float shift[2][kWide];
    alignas(16) T weights[kWide][kColumns];
    SmallPixel<T, 4> zeros;  // for columns of A past the last tap
  };

  const Parameters& p;
  Shared& shared;
  int first_feature;
  SmallPixel<T, kChannels> next[kLoads];
  float next_shift;
  uint2 right[kSteps][4 * kGroups];  // the fragments of B

  __device__ Block(const Parameters& parameters, Shared& memory)
      : p(parameters), shared(memory), first_feature(blockIdx.y * kWide) {}

  // Loads the next tile into registers.
  __device__ void load(int tile) {
    const auto at = p.tiling.at(tile);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int pixel = threadIdx.x + i * kThreads, row = at.row - 1 + pixel / Tiles::kHaloColumns,
                column = at.column - 1 + pixel % Tiles::kHaloColumns;
      const bool there = pixel < Tiles::kHaloPixels && p.tiling.inside(row, column);
      const T* from = static_cast<const T*>(p.x);
      next[i].load(there ? from + p.tiling.index(at.sample, row, column) * p.channels : nullptr,
                   p.channels);
    }
    const int feature = first_feature + threadIdx.x;
    if (threadIdx.x < kWide && feature < p.features)
      next_shift = p.shift.data[at.sample * p.shift.stride + feature];
  }

  // Stores the registers that `load` filled to a stage of shared memory.
  __device__ void store(int stage) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int pixel = threadIdx.x + i * kThreads;
      if (pixel < Tiles::kHaloPixels) shared.pixels[stage][pixel] = next[i];
    }
    if (threadIdx.x < kWide) shared.shift[stage][threadIdx.x] = next_shift;
  }

  // Loads B through shared memory, so that a block reads each weight from global memory once.
  __device__ void load_weights() {
    if (threadIdx.x < 4) shared.zeros.at[threadIdx.x] = narrow<T>(0.0f);
    const int feature = threadIdx.x % kWide;
#pragma unroll
    for (int i = 0; i < 16 * kSteps; i += kThreads / kWide) {
      const int entry = i + threadIdx.x / kWide, tap = entry / kChannels,
                channel = entry % kChannels;
      const bool there = tap < 9 && channel < p.channels && first_feature + feature < p.features;
      shared.weights[feature][entry] =
          there ? p.weights.at<T>(tap, channel, first_feature + feature) : narrow<T>(0.0f);
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, column = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < 4 * kGroups; ++j) {
        // Column 2 t + i of fragment j is feature 8 t + 2 j + i of the group.
        const int feature = j / 4 * 32 + column / 2 * 8 + j % 4 * 2 + column % 2;
        right[s][j] = *reinterpret_cast<const uint2*>(&shared.weights[feature][16 * s + 4 * t]);
      }
    }
  }

  // Two registers of a fragment of A: four channels of one tap, for the pixel at `index` of the
  // haloed tile.
  __device__ uint2 left(int stage, int index, int step) const {
    const int entry = 16 * step + threadIdx.x % 4 * 4, tap = entry / kChannels;
    const int pixel = index + tap / 3 * Tiles::kHaloColumns + tap % 3;
    const T* from = tap < 9 ? &shared.pixels[stage][pixel].at[entry % kChannels] : shared.zeros.at;
    return *reinterpret_cast<const uint2*>(from);
  }

  // Multiplies a tile, adds the shift and stores y.
  __device__ void multiply(int stage, int tile) const {
    const auto at = p.tiling.at(tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, t = lane % 4;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = 4 * warp + 2 * pair;
      float sums[4 * kGroups][4] = {};
      __syncwarp();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint2 upper = left(stage, row * Tiles::kHaloColumns + column, s),
                    lower = left(stage, (row + 1) * Tiles::kHaloColumns + column, s);
        const uint32_t fragment[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
        for (int j = 0; j < 4 * kGroups; ++j)
          mma_m16n8k16(sums[j], fragment, right[s][j].x, right[s][j].y, T());
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int feature = 32 * group + 8 * t;
        const float* shift = shared.shift[stage] + feature;
        if (first_feature + feature >= p.features) continue;
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          if (!p.tiling.inside(at.row + row + down, at.column + column)) continue;
          Eight<T> out;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            out.at[i] = narrow<T>(sums[4 * group + i / 2][2 * down + i % 2] + shift[i]);
          out.store(static_cast<T*>(p.y) +
                    p.tiling.index(at.sample, at.row + row + down, at.column + column) *
                        p.features +
                    first_feature + feature);
        }
      }
    }
  }

  __device__ void run() {
    next_shift = 0;
    load(blockIdx.x);
    load_weights();
    int stage = 0;
    for (int tile = blockIdx.x; tile < p.tiling.tiles; tile += gridDim.x, stage ^= 1) {
      store(stage);
      // One barrier per tile is enough: a thread stores to this stage again only after the next
      // barrier.
      __syncthreads();
      if (tile + static_cast<int>(gridDim.x) < p.tiling.tiles) load(tile + gridDim.x);
      multiply(stage, tile);
    }
  }
};

template <class T, int kChannels>
__global__ void __launch_bounds__(kThreads, kBlocks<kChannels>)
    few_channels_forward_kernel(const Parameters p) {
  __shared__ typename Block<T, kChannels>::Shared shared;
  Block<T, kChannels>(p, shared).run();
}

template <class T>
cudaError_t run(const Parameters& p, int multiprocessors, cudaStream_t stream) {
  const int chunks = (p.features + kWide - 1) / kWide;
  const bool four = p.channels <= 4;
  const int blocks = std::max((four ? kBlocks<4> : kBlocks<8>)*multiprocessors / chunks, 1);
  const auto kernel = four ? few_channels_forward_kernel<T, 4> : few_channels_forward_kernel<T, 8>;
  return launch(kernel, dim3(std::min(p.tiling.tiles, blocks), chunks), kThreads, 0, stream, p);
}

}  // namespace

cudaError_t few_channels_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream) {
  const int channels = static_cast<int>(plan.x.total), features = static_cast<int>(plan.features);
  const Parameters p{
      plan.x.data[0], channels,   features,      {plan.kernel, channels, features, plan.flipped},
      Tiles(plan),    plan.shift, plan.y.data[0]};
  if (p.tiling.tiles == 0 || features == 0) return cudaSuccess;
  return plan.type == Type::kFloat16 ? run<__half>(p, multiprocessors, stream)
                                     : run<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace jaxunet::cuda
