// The CUDA side of the attention handlers. The functions enqueue kernels on `stream`, allocate
// nothing, and return the first launch error.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

cudaError_t attention_forward(const AttentionForward& plan, cudaStream_t stream, KernelSet kernels);
cudaError_t attention_backward(const AttentionBackward& plan, cudaStream_t stream,
                               KernelSet kernels);

}  // namespace jaxunet::cuda
