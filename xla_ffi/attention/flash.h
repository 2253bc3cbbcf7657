// The flash kernels: attention on the tensor cores, softmax and products tile by tile. Dao et al. 2022, arXiv
// 2205.14135; Dao 2023, arXiv 2307.08691.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "plan.h"

namespace jaxunet::cuda {

// nothing: this plan is not for them, or its tiles need more shared memory than `shared_bytes`, what the device has.
template <Type type>
std::optional<cudaError_t> flash_forward(const AttentionForward& plan, int shared_bytes, cudaStream_t stream);
template <Type type>
std::optional<cudaError_t> flash_backward(const AttentionBackward& plan, int shared_bytes, cudaStream_t stream);

}  // namespace jaxunet::cuda
