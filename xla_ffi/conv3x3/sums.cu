// Sums that the weight gradient ends with: of dy over the pixels of a sample, and of partial sums in a fixed order.

#include "kernels.h"
#include "launch.cuh"
#include "numbers.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kLanes = 32, kRows = 8;

// Adds the rows of a block in order; the first row has the total.
__device__ float add_rows(float mine) {
  __shared__ float rows[kRows][kLanes + 1];
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  rows[row][lane] = mine;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kRows; ++i) total += rows[i][lane];
  __syncthreads();
  return total;
}

// Block (32 features, sample, segment).
template <class T>
__global__ void __launch_bounds__(kLanes* kRows)
    channel_sums_kernel(const T* dy, int image, int features, float* sums) {
  const int feature = blockIdx.x * kLanes + threadIdx.x % kLanes, segments = gridDim.z;
  const int share = (image + segments - 1) / segments, first = blockIdx.z * share;
  const int last = first + share < image ? first + share : image;
  float total = 0;
  if (feature < features) {
    const T* from = dy + static_cast<int64_t>(blockIdx.y) * image * features + feature;
#pragma unroll 8
    for (int pixel = first + threadIdx.x / kLanes; pixel < last; pixel += kRows)
      total += wide(from[static_cast<int64_t>(pixel) * features]);
  }
  total = add_rows(total);
  if (threadIdx.x < kLanes && feature < features) {
    sums[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * features + feature] = total;
  }
}

// The blocks of `first`, then those of `second`: 32 entries each.
__global__ void __launch_bounds__(kLanes* kRows) ordered_sums_kernel(const OrderedSum first, const OrderedSum second) {
  const int64_t blocks = (first.count + kLanes - 1) / kLanes;
  const bool is_first = blockIdx.x < blocks;
  const OrderedSum job = is_first ? first : second;
  const int64_t entry = (blockIdx.x - (is_first ? 0 : blocks)) * kLanes + threadIdx.x % kLanes;
  float total = 0;
  if (entry < job.count) {
#pragma unroll 8
    for (int part = threadIdx.x / kLanes; part < job.parts; part += kRows) total += job.from[part * job.count + entry];
  }
  total = add_rows(total);
  if (threadIdx.x < kLanes && entry < job.count) job.to[entry] = total;
}

}  // namespace

cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums, cudaStream_t stream) {
  const int image = static_cast<int>(plan.height * plan.width), features = static_cast<int>(plan.features);
  const dim3 grid((features + kLanes - 1) / kLanes, static_cast<unsigned>(plan.batch), segments);
  const auto run = [&](auto* dy) {
    return launch(channel_sums_kernel<std::remove_const_t<std::remove_pointer_t<decltype(dy)>>>, grid, kLanes * kRows,
                  0, stream, dy, image, features, sums);
  };
  switch (plan.type) {
    case Type::kFloat32:
      return run(static_cast<const float*>(plan.dy));
    case Type::kFloat16:
      return run(static_cast<const __half*>(plan.dy));
    default:
      return run(static_cast<const __nv_bfloat16*>(plan.dy));
  }
}

cudaError_t ordered_sums(const OrderedSum& first, const OrderedSum& second, cudaStream_t stream) {
  const int64_t blocks = (first.count + kLanes - 1) / kLanes + (second.count + kLanes - 1) / kLanes;
  if (blocks == 0) return cudaSuccess;
  return launch(ordered_sums_kernel, dim3(static_cast<unsigned>(blocks)), kLanes * kRows, 0, stream, first, second);
}

}  // namespace jaxunet::cuda
