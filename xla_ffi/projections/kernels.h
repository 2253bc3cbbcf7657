// Entry points of the handlers of projections. The kernels are the same on every GPU, so they
// belong to every KernelSet.
#pragma once

#include <cuda_runtime_api.h>

#include "projections/plan.h"

namespace jaxunet::cuda {

cudaError_t projections(const Projections& plan, cudaStream_t stream, KernelSet);
cudaError_t projection_gradients(const ProjectionGradients& plan, cudaStream_t stream, KernelSet);

}  // namespace jaxunet::cuda
