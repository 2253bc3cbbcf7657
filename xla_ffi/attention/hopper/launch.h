// Attention with wgmma and TMA, for GPUs of compute capability 9.0 and 16-bit types: heads that fit
// in shared memory as a whole (forward.cuh, backward.cuh), heads that a cluster shares
// (backward_cluster.cuh), or heads that stream through shared memory (streaming.cuh). Each type is
// one source file (bfloat16.cu, float16.cu), so that they compile in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "attention/plan.h"

namespace jaxunet::cuda {

// Launch the Hopper kernels. Return nothing if they do not accept the shape (shapes.cuh).
template <Type type>
std::optional<cudaError_t> hopper_attention_forward(const AttentionForward& plan,
                                                    int multiprocessors, cudaStream_t stream);
template <Type type>
std::optional<cudaError_t> hopper_attention_backward(const AttentionBackward& plan,
                                                     int multiprocessors, cudaStream_t stream);

}  // namespace jaxunet::cuda
