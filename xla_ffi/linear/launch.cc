// The linear layer runs as a convolution without taps (plan.h): conv3x3/dispatch.h chooses its
// kernel.
#include "conv3x3/kernels.h"
#include "linear/kernels.h"

namespace jaxunet::cuda {

cudaError_t linear(const Conv3x3& plan, cudaStream_t stream, KernelSet kernels) {
  return conv3x3(plan, stream, kernels);
}

cudaError_t linear_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream,
                                   KernelSet kernels) {
  return conv3x3_weight_gradient(plan, stream, kernels);
}

}  // namespace jaxunet::cuda
