// From the moments of a tensor's tiles to its normalisation: one small kernel, which never reads the tensor.
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "statistics.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOwn = 32;  // channels of a block, about: a line of moments twice

struct Combine {
  int parts, channels[kMaxParts], tiles[kMaxParts];
  const float2* data[kMaxParts];  // (batch, tiles, channels)
  int total, group, own, rows;    // own: channels of a block, whole groups; rows: threads that share a channel's tiles
  int height, width;
  Rows scale, offset;
  float eps;
  Results to;
};

// Count, mean and squared deviations of one row's tiles of a channel: sums of differences from the first mean.
__device__ float4 join_tiles(const Combine& f, int channel, int row) {
  int part = 0;
#pragma unroll 1
  while (part + 1 < f.parts && channel >= f.channels[part]) channel -= f.channels[part++];
  const int tiles = f.tiles[part], width = f.channels[part], across = (f.width + kMomentSide - 1) / kMomentSide;
  if (row >= tiles) return make_float4(0, 0, 0, 0);
  const float2* from = f.data[part] + static_cast<int64_t>(blockIdx.z) * tiles * width + channel;
  const float pivot = from[static_cast<int64_t>(row) * width].x;
  float count = 0, sum = 0, squares = 0;
#pragma unroll 8
  for (int tile = row; tile < tiles; tile += f.rows) {
    const float2 moments = from[static_cast<int64_t>(tile) * width];
    const int down = tile / across;
    const int pixels = min(kMomentSide, f.height - down * kMomentSide) *
                       min(kMomentSide, f.width - (tile - down * across) * kMomentSide);
    const float weight = static_cast<float>(tiles == 1 ? f.height * f.width : pixels);
    const float away = moments.x - pivot;
    count += weight;
    sum += weight * away;
    squares += weight * (moments.y + away * away);
  }
  const float away = sum / count;
  return make_float4(count, pivot + away, fmaxf(squares - sum * away, 0.0f), 0);
}

__global__ void __launch_bounds__(kThreads) group_norm_combine(const __grid_constant__ Combine f) {
  const int first = static_cast<int>(blockIdx.y) * f.own, there = min(f.own, f.total - first);
  const Cut cut{f.own, f.group, 0, f.rows, 1};
  const Scratch scratch(cut, shared_memory());
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += kThreads) {
    scratch.scale[c] = of_sample(f.scale)[first + c];
    scratch.offset[c] = of_sample(f.offset)[first + c];
  }
  const int lanes = kThreads / f.rows, row = static_cast<int>(threadIdx.x) / lanes;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x) % lanes; c < f.own && row < f.rows; c += lanes) {
    scratch.partial[row * f.own + c] = c < there ? join_tiles(f, first + c, row) : make_float4(0, 0, 0, 0);
  }
  __syncthreads();
  join_groups(cut, f.eps, scratch);
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < there; c += kThreads) {
    finish(f.to, scratch, cut, false, c, static_cast<int64_t>(blockIdx.z) * f.total + first + c);
  }
}

}  // namespace

cudaError_t norm_combine(const NormCombine& plan, cudaStream_t stream) {
  if (plan.batch == 0 || plan.moments.total == 0) return cudaSuccess;
  Limits limits;
  if (const cudaError_t error = describe(&limits); error != cudaSuccess) return error;
  Combine f{};
  f.parts = plan.moments.count;
  for (int i = 0; i < f.parts; ++i) {
    f.channels[i] = static_cast<int>(plan.moments.channels[i]);
    f.tiles[i] = static_cast<int>(plan.tiles[i]);
    f.data[i] = static_cast<const float2*>(plan.moments.data[i]);
  }
  f.total = static_cast<int>(plan.moments.total);
  f.group = f.total / static_cast<int>(plan.groups);
  f.own = f.group * static_cast<int>(std::min<int64_t>(ceil_of(kOwn, f.group), plan.groups));
  f.rows = std::max(kThreads / f.own, 1);
  f.height = static_cast<int>(plan.height);
  f.width = static_cast<int>(plan.width);
  f.scale = plan.scale;
  f.offset = plan.offset;
  f.eps = plan.eps;
  f.to = {plan.a, plan.b, plan.mean, plan.inverse};
  const int64_t groups = f.own / f.group;
  const int64_t bytes = static_cast<int64_t>(sizeof(float4)) * (f.rows * f.own + groups) +
                        static_cast<int64_t>(sizeof(float)) * (3 * f.own + 2 * groups);
  if (bytes > limits.shared) {
    throw std::runtime_error("groups of " + std::to_string(f.group) + " channels need " + std::to_string(bytes) +
                             " bytes of shared memory a block, found " + std::to_string(limits.shared) +
                             "; use more groups, or backend=pallas or xla");
  }
  const dim3 grid(1, static_cast<unsigned>(ceil_of(f.total, f.own)), static_cast<unsigned>(plan.batch));
  return launch(group_norm_combine, grid, kThreads, bytes, stream, f);
}

}  // namespace jaxunet::cuda
