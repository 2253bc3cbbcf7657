// Flash attention on the tensor cores: flash_forward.cuh and flash_backward.cuh. Each type is one
// source file (flash_float32.cu, ...), so that they compile in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "plan.h"

namespace jaxunet::cuda {

// Launch the flash kernels. Return nothing if they do not accept the shape (flash_shapes.cuh), or
// if their tiles need more than `shared_bytes`, the most shared memory per block on this device.
template <Type type>
std::optional<cudaError_t> flash_forward(const AttentionForward& plan, int shared_bytes,
                                         cudaStream_t stream);
template <Type type>
std::optional<cudaError_t> flash_backward(const AttentionBackward& plan, int shared_bytes,
                                          cudaStream_t stream);

}  // namespace jaxunet::cuda
