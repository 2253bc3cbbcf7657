// Entry point of the handler of several weight gradients.
#pragma once

#include <cuda_runtime_api.h>

#include "weight_gradients/plan.h"

namespace jaxunet::cuda {

// On Hopper, all gradients that its kernels take are computed in as few launches as possible. The
// others run one after the other.
cudaError_t weight_gradients(const WeightGradients& plan, cudaStream_t stream, KernelSet kernels);

}  // namespace jaxunet::cuda
