// The CUDA side of the handlers. The functions enqueue kernels on `stream`, allocate nothing, and
// return the first launch error. The kernels are the same on every GPU, so they belong to every
// KernelSet.
#pragma once

#include <cuda_runtime_api.h>

#include "adamw/plan.h"

namespace jaxunet::cuda {

cudaError_t sum_of_squares(const SumOfSquares& plan, cudaStream_t stream, KernelSet);
cudaError_t adamw(const AdamW& plan, cudaStream_t stream, KernelSet);
cudaError_t narrow_all(const Narrow& plan, cudaStream_t stream, KernelSet);
cudaError_t pack(const Pack& plan, cudaStream_t stream, KernelSet);

}  // namespace jaxunet::cuda
