// Launches of the CUDA kernels; they allocate nothing and run on the given stream.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jaxunet::cuda {

cudaError_t sum_of_squares(const SumOfSquares& plan, cudaStream_t stream);
cudaError_t adamw(const AdamW& plan, cudaStream_t stream);
cudaError_t narrow_all(const Narrow& plan, cudaStream_t stream);

}  // namespace jaxunet::cuda
