// Moments of y by tiles of 8 × 8 pixels, read once more: for the kernels that do not take them on their way.

#include "kernels.h"
#include "launch.cuh"
#include "numbers.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kChannels = 64, kShares = 4;  // of a block: a share has two rows of the tile
constexpr int kRows = kMomentSide / kShares;

struct TileMoments {
  const void* y;
  float2* to;
  int height, width, features, across, tiles;
};

// Mean and sum of squared deviations, first of a thread's pixels, then of all shares (Chan, Golub & LeVeque 1979).
template <class T>
__global__ void __launch_bounds__(kChannels* kShares) tile_moments_kernel(const TileMoments m) {
  __shared__ float means[kShares][kChannels], deviations[kShares][kChannels];
  const int c = threadIdx.x % kChannels, share = threadIdx.x / kChannels, f = blockIdx.y * kChannels + c;
  const int sample = blockIdx.x / m.tiles, tile = blockIdx.x % m.tiles;
  const int top = tile / m.across * kMomentSide, left = tile % m.across * kMomentSide;
  const int columns = min(kMomentSide, m.width - left);
  const auto rows_of = [&](int s) { return max(min(kRows, m.height - top - s * kRows), 0); };
  const int rows = f < m.features ? rows_of(share) : 0;
  const T* from = static_cast<const T*>(m.y) +
                  ((static_cast<int64_t>(sample) * m.height + top + share * kRows) * m.width + left) * m.features + f;
  float values[kRows][kMomentSide], mean = 0, deviation = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int column = 0; column < kMomentSide; ++column) {
      const bool there = row < rows && column < columns;
      values[row][column] = there ? wide(from[(static_cast<int64_t>(row) * m.width + column) * m.features]) : 0.0f;
      mean += values[row][column];
    }
  }
  if (rows > 0) mean /= static_cast<float>(rows * columns);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int column = 0; column < kMomentSide; ++column) {
      const float away = values[row][column] - mean;
      if (row < rows && column < columns) deviation += away * away;
    }
  }
  means[share][c] = mean;
  deviations[share][c] = deviation;
  __syncthreads();
  if (share > 0 || f >= m.features) return;
  const float all = 1.0f / static_cast<float>(min(kMomentSide, m.height - top) * columns);
  float middle = 0, total = 0;
#pragma unroll
  for (int s = 0; s < kShares; ++s) middle += means[s][c] * (static_cast<float>(rows_of(s) * columns) * all);
#pragma unroll
  for (int s = 0; s < kShares; ++s) {
    const float away = means[s][c] - middle;
    if (rows_of(s) > 0) total += deviations[s][c] + static_cast<float>(rows_of(s) * columns) * away * away;
  }
  m.to[static_cast<int64_t>(blockIdx.x) * m.features + f] = make_float2(middle, total * all);
}

}  // namespace

cudaError_t tile_moments(const Conv3x3& plan, cudaStream_t stream) {
  const int64_t tiles = moment_tiles(plan.height, plan.width);
  const TileMoments m{plan.y,
                      reinterpret_cast<float2*>(plan.moments),
                      static_cast<int>(plan.height),
                      static_cast<int>(plan.width),
                      static_cast<int>(plan.features),
                      static_cast<int>((plan.width + kMomentSide - 1) / kMomentSide),
                      static_cast<int>(tiles)};
  if (plan.batch * tiles * plan.features == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(plan.batch * tiles),
                  static_cast<unsigned>((plan.features + kChannels - 1) / kChannels));
  const auto kernel = plan.type == Type::kFloat32   ? tile_moments_kernel<float>
                      : plan.type == Type::kFloat16 ? tile_moments_kernel<__half>
                                                    : tile_moments_kernel<__nv_bfloat16>;
  return launch(kernel, grid, kChannels * kShares, 0, stream, m);
}

}  // namespace jaxunet::cuda
