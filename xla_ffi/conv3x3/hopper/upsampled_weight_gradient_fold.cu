// Adds the partial results of the weight gradient by phases in a fixed order, folds the gradients
// of the 16 taps of the phases into those of the kernel's nine, and adds the sums of dy.
//
// A block has 32 lanes × 16 taps × kSplitRows rows. A lane holds four entries of each tap, so a
// warp holds 16 features × eight channels (accumulator_tile.h). Row r adds them over splits r, r +
// kSplitRows, ... Then each thread adds the phase taps of one kernel tap, for four adjacent
// features. Other blocks add the sums of dy: a lane has four adjacent entries, and the parts to add
// are divided among all rows and taps.
//
// __syncthreads: the sums of the rows have been written to shared memory.
#include <algorithm>

#include "common/dispatch_dtype.cuh"
#include "common/fast_divmod.h"
#include "common/integers.h"
#include "common/launch.cuh"
#include "common/types.cuh"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/hopper/upsampled_weight_gradient.h"

namespace jaxunet::cuda::weight_gradient {
namespace {

constexpr int kLanes = 32, kTaps = 16, kSplitRows = 2, kRows = kTaps * kSplitRows;
constexpr int kThreads = kLanes * kRows;
constexpr int kAhead = 4;                                      // reads in flight
constexpr int kGroups = UpsampledTile::kThreads / kLanes * 8;  // warps per tap of a tile

struct Fold {
  const float *partials, *shift;
  Result dkernel, dshift;
  int channels, features;
  int splits, x_blocks, shift_parts, shift_count;
  int fold_blocks;  // the first blocks; the others add the sums of dy
  FastDivmod feature_blocks;
};

// The sum of `from` + i * stride for i = first, first + step, ... below `count`.
__device__ float4 summed(const float* from, int64_t stride, int first, int step, int count) {
  float4 total{0, 0, 0, 0};
  for (int i = first; i < count; i += kAhead * step) {
    float4 values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      values[n] = {0, 0, 0, 0};
      if (i + n * step < count)
        values[n] = *reinterpret_cast<const float4*>(from + (i + n * step) * stride);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      total.x += values[n].x;
      total.y += values[n].y;
      total.z += values[n].z;
      total.w += values[n].w;
    }
  }
  return total;
}

// Writes four adjacent entries of a result; `entry` is a multiple of four.
__device__ void put(const Result& to, int64_t entry, const float (&values)[4]) {
  const auto write = [&](auto* data) {
    using T = std::remove_reference_t<decltype(*data)>;
    AlignedArray<T, 4> four;
#pragma unroll
    for (int i = 0; i < 4; ++i) four.at[i] = narrow<T>(values[i]);
    *reinterpret_cast<AlignedArray<T, 4>*>(data + entry) = four;
  };
  switch (to.type) {
    case Type::kFloat32:
      return write(static_cast<float*>(to.data));
    case Type::kFloat16:
      return write(static_cast<__half*>(to.data));
    default:
      return write(static_cast<__nv_bfloat16*>(to.data));
  }
}

// Tap row u of the phases (a, b) is a sum of kernel rows: (a, u) = (0, 0) of row 0, (0, 1) of rows
// 1 and 2, (1, 0) of rows 0 and 1, (1, 1) of row 2; columns (b, v) likewise. So each kernel row is
// part of two tap rows. Returns the first (n = 0) or the second (n = 1) as 2 a + u.
__device__ int tap_of(int row, int n) { return n == 0 ? row > 0 : row < 2 ? 2 : 3; }

__device__ void fold(const Fold& p, float4* sums) {
  const int lane = threadIdx.x % kLanes, tap = threadIdx.x / kLanes % kTaps,
            row = threadIdx.x / (kLanes * kTaps);
  // The group's place: the tile, and in it eight channels and 16 features.
  const int tile = blockIdx.x / kGroups, group = blockIdx.x % kGroups, eight = group / 4,
            sixteen = group % 4;
  const int x_block = p.feature_blocks.quotient(tile),
            feature_block = p.feature_blocks.remainder(tile, x_block);
  const int tiles = p.x_blocks * static_cast<int>(p.feature_blocks.divisor);
  // tap = 8 a + 4 u + 2 b + v
  const int a = tap / 8, u = tap / 4 % 2, b = tap / 2 % 2, v = tap % 2;
  const float* from = p.partials +
                      static_cast<int64_t>(a * tiles + tile) * UpsampledTile::kEntries +
                      UpsampledTile::entry(2 * b + u, 8 * v + eight, sixteen * kLanes + lane);
  sums[threadIdx.x] = summed(from, static_cast<int64_t>(2 * tiles) * UpsampledTile::kEntries, row,
                             kSplitRows, p.splits);
  __syncthreads();
  const int four = threadIdx.x % 4, channel = threadIdx.x / 4 % 8, of_kernel = threadIdx.x / kLanes;
  if (of_kernel >= 9) return;
  const float* all = reinterpret_cast<const float*>(sums);
  float values[4] = {0, 0, 0, 0};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int folded = 4 * tap_of(of_kernel / 3, n / 2) + tap_of(of_kernel % 3, n % 2);
#pragma unroll
    for (int r = 0; r < kSplitRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int f = 4 * four + i;
        values[i] += all[((r * kTaps + folded) * kLanes + f % 8 * 4 + channel / 2) * 4 + f / 8 * 2 +
                         channel % 2];
      }
    }
  }
  const int64_t c =
      static_cast<int64_t>(of_kernel) * p.channels + x_block * kChunk + 8 * eight + channel;
  put(p.dkernel, c * p.features + feature_block * kChunk + 16 * sixteen + 4 * four, values);
}

__device__ void add_shift(const Fold& p, float4* sums) {
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const int entry = ((blockIdx.x - p.fold_blocks) * kLanes + lane) * 4;
  if (entry < p.shift_count)
    sums[threadIdx.x] = summed(p.shift + entry, p.shift_count, row, kRows, p.shift_parts);
  __syncthreads();
  if (row > 0 || entry >= p.shift_count) return;
  float values[4] = {0, 0, 0, 0};
  for (int i = 0; i < kRows; ++i) {
    const float4 more = sums[i * kLanes + lane];
    values[0] += more.x;
    values[1] += more.y;
    values[2] += more.z;
    values[3] += more.w;
  }
  put(p.dshift, entry, values);
}

__global__ void __launch_bounds__(kThreads) fold_upsampled_kernel(const Fold p) {
  __shared__ float4 sums[kThreads];
  if (static_cast<int>(blockIdx.x) < p.fold_blocks) {
    fold(p, sums);
  } else {
    add_shift(p, sums);
  }
}

}  // namespace

cudaError_t fold_upsampled(const UpsampledWeightGradient& plan, const UpsampledPartials& partials,
                           cudaStream_t stream) {
  Fold p{};
  p.partials = partials.tiles;
  p.shift = partials.shift;
  p.dkernel = plan.dkernel;
  p.dshift = plan.dshift;
  p.channels = static_cast<int>(plan.channels);
  p.features = static_cast<int>(plan.features);
  p.splits = partials.splits;
  p.x_blocks = p.channels / kChunk;
  p.feature_blocks = FastDivmod(p.features / kChunk);
  // If all samples share one shift, each sample's sum in a slot is a part to add.
  const int64_t parts_of_slot = plan.shifts == 1 ? plan.batch : 1;
  p.shift_parts = static_cast<int>(2 * partials.slots * parts_of_slot);
  p.shift_count = static_cast<int>(plan.shifts * plan.features);
  p.fold_blocks = p.x_blocks * (p.features / kChunk) * kGroups;
  const int shift_blocks = (p.shift_count + 4 * kLanes - 1) / (4 * kLanes);
  return launch(fold_upsampled_kernel, dim3(p.fold_blocks + shift_blocks), kThreads, 0, stream, p);
}

}  // namespace jaxunet::cuda::weight_gradient
