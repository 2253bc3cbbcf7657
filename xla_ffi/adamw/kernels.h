// The CUDA side of the handlers. The functions enqueue kernels on `stream`, allocate nothing, and
// return the first launch error.
#pragma once

#include <cuda_runtime_api.h>

#include "adamw/plan.h"

namespace jaxunet::cuda {

cudaError_t sum_of_squares(const SumOfSquares& plan, cudaStream_t stream);
cudaError_t adamw(const AdamW& plan, cudaStream_t stream);
cudaError_t narrow_all(const Narrow& plan, cudaStream_t stream);

}  // namespace jaxunet::cuda
