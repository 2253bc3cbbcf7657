// Descriptions of arrays for Hopper's copy engine (TMA).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "plan.h"

namespace jaxunet::cuda {

// A dense array of a 16-bit type, dimensions innermost first, copied in boxes of these sizes whose rows of 128 bytes
// are swizzled in shared memory. The innermost dimension is a multiple of 8.
cudaError_t tensor_map(CUtensorMap* map, Type type, const void* data, std::initializer_list<int64_t> dimensions,
                       std::initializer_list<int> box);

}  // namespace jaxunet::cuda
