// Computes the sums of a norm's gradient over the pixels of each sample from the sums over its
// strips (hopper/norm_gradient_epilogue.cuh).
//
// Grid: one block for every 32 channels of a sample. Its 256 threads are 32 channels × 8 slices of
// the strips, whose sums are combined in static shared memory in a fixed order.
#include "common/launch.cuh"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace {

constexpr int kChannels = 32, kSlices = 8;

struct NormSums {
  const float* from;  // (batch, strips, 2, channels): sums of dz and dz · x
  float* to;          // (batch, 2, channels): sums of dz and dz · n
  Rows mean, inverse;
  int strips, channels, tiles;  // tiles: blocks per sample
};

__global__ void __launch_bounds__(kChannels* kSlices) add_norm_sums(const NormSums p) {
  __shared__ float partial[2][kSlices][kChannels];
  const int sample = static_cast<int>(blockIdx.x) / p.tiles, tile = blockIdx.x % p.tiles;
  const int lane = threadIdx.x % kChannels, slice = threadIdx.x / kChannels;
  const int channel = tile * kChannels + lane;
  const bool there = channel < p.channels;
  float sums[2] = {};
#pragma unroll 4
  for (int strip = slice; there && strip < p.strips; strip += kSlices) {
    const float* const at =
        p.from + (static_cast<int64_t>(sample) * p.strips + strip) * 2 * p.channels + channel;
    sums[0] += at[0];
    sums[1] += at[p.channels];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) partial[i][slice][lane] = sums[i];
  __syncthreads();
  if (slice > 0 || !there) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int other = 1; other < kSlices; ++other) sums[i] += partial[i][other][lane];
  }
  const float mean = p.mean.data[sample * p.mean.stride + channel],
              inverse = p.inverse.data[sample * p.inverse.stride + channel];
  float* const to = p.to + static_cast<int64_t>(sample) * 2 * p.channels + channel;
  to[0] = sums[0];
  to[p.channels] = (sums[1] - mean * sums[0]) * inverse;
}

}  // namespace

cudaError_t norm_sums(const Conv3x3NormGradient& plan, int strips, cudaStream_t stream) {
  const int channels = static_cast<int>(plan.conv.features);
  const int tiles = (channels + kChannels - 1) / kChannels;
  const NormSums p{plan.workspace, plan.sums, plan.mean, plan.inverse, strips, channels, tiles};
  const int64_t blocks = plan.conv.batch * tiles;
  if (blocks == 0) return cudaSuccess;
  return launch(add_norm_sums, dim3(static_cast<unsigned>(blocks)), kChannels * kSlices, 0, stream,
                p);
}

}  // namespace jaxunet::cuda
