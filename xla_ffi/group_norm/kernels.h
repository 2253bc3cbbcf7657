// The CUDA side of the GroupNorm handlers. The functions enqueue kernels on `stream`, allocate
// nothing, and return the first launch error. The handlers pass a kernel set;
// tools/gpu/harness/gnfwd uses the default.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

cudaError_t norm_forward(const NormForward& plan, cudaStream_t stream,
                         KernelSet kernels = KernelSet::kFastest);
cudaError_t norm_dropout_forward(const NormForward& plan, cudaStream_t stream,
                                 KernelSet kernels = KernelSet::kFastest);
cudaError_t norm_statistics(const NormStatistics& plan, cudaStream_t stream,
                            KernelSet kernels = KernelSet::kFastest);
cudaError_t norm_gradient(const NormGradient& plan, cudaStream_t stream,
                          KernelSet kernels = KernelSet::kFastest);
cudaError_t norm_dropout_gradient(const NormGradient& plan, cudaStream_t stream,
                                  KernelSet kernels = KernelSet::kFastest);

}  // namespace jaxunet::cuda
