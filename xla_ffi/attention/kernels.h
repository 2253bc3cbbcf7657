// Launches of the CUDA kernels; they allocate nothing and run on the given stream.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

cudaError_t attention_forward(const AttentionForward& plan, cudaStream_t stream);
cudaError_t attention_backward(const AttentionBackward& plan, cudaStream_t stream);

}  // namespace jaxunet::cuda
