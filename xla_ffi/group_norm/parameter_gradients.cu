// The gradients of scale and offset from each sample's sums: dscale = sum of dz * n, doffset = sum
// of dz, added over the batch if all samples share one row.
//
// Grid: (tiles of 32 channels, 2): y = 0 is offset, 1 is scale. A block's 1024 threads are 32
// channels × 32 slices of the batch, whose sums are combined in static shared memory. The streaming
// backward pass does the same in its second kernel.
#include "gradient.cuh"
#include "launch.h"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = kReduceChannels * kManyReduceSlices;

__global__ void __launch_bounds__(kThreads)
    group_norm_parameters(const __grid_constant__ ParameterGradients p) {
  reduce_parameter_gradients<kManyReduceSlices>(p, static_cast<int>(blockIdx.x),
                                                static_cast<int>(blockIdx.y));
}

}  // namespace

cudaError_t launch_parameter_gradients(const NormGradient& plan, cudaStream_t stream) {
  if (!plan.parameter_gradients) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(plan.x.total, kReduceChannels)), 2);
  return launch(group_norm_parameters, grid, kThreads, 0, stream, parameter_gradients_of(plan));
}

}  // namespace jaxunet::cuda
