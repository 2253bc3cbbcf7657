// Attention without tensor cores, for heads of width 1 to 256, whose rows need no alignment:
// simple.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

cudaError_t simple_attention_forward(const AttentionForward& plan, cudaStream_t stream);
cudaError_t simple_attention_backward(const AttentionBackward& plan, cudaStream_t stream);

}  // namespace jaxunet::cuda
