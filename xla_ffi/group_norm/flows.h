// Normalisations of large images, which flow.h cuts: two kernels each.
#pragma once

#include <cuda_runtime_api.h>

#include "flow.h"
#include "plan.h"

namespace jaxunet::cuda {

struct Results;

// The statistics and, where y is not null, the activation. `vectors`: all parts are read 16 bytes at a time.
cudaError_t flow_forward(const NormInput& plan, const Flow& flow, const Limits& limits, bool vectors, const Results& to,
                         bool silu, void* y, cudaStream_t stream);

// All of the gradient, that of scale and offset too.
cudaError_t flow_gradient(const NormGradient& plan, const Flow& flow, const Limits& limits, bool vectors,
                          cudaStream_t stream);

}  // namespace jaxunet::cuda
