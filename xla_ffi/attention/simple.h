// Attention without tensor cores (simple.cu), for heads of width 1 to 256 with rows of any
// alignment.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

cudaError_t simple_attention_forward(const AttentionForward& plan, cudaStream_t stream);
cudaError_t simple_attention_backward(const AttentionBackward& plan, cudaStream_t stream);

}  // namespace jaxunet::cuda
