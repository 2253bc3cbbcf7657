// Flash attention on the tensor cores: flash_forward.cuh and flash_backward.cuh. Each type is one
// source file (flash_float32.cu, ...), so that they compile in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "plan.h"

namespace jaxunet::cuda {

// Launch the flash kernels. Return nothing where they do not take the shape (flash_shapes.cuh), or
// where their tiles need more than `shared_bytes`, the shared memory that a block may have on this
// device.
template <Type type>
std::optional<cudaError_t> flash_forward(const AttentionForward& plan, int shared_bytes,
                                         cudaStream_t stream);
template <Type type>
std::optional<cudaError_t> flash_backward(const AttentionBackward& plan, int shared_bytes,
                                          cudaStream_t stream);

}  // namespace jaxunet::cuda
