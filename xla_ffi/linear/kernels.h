// Entry points of the linear layer's handlers.
#pragma once

#include <cuda_runtime_api.h>

#include "linear/plan.h"

namespace jaxunet::cuda {

cudaError_t linear(const Conv3x3& plan, cudaStream_t stream, KernelSet kernels);
cudaError_t linear_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream,
                                   KernelSet kernels);

}  // namespace jaxunet::cuda
