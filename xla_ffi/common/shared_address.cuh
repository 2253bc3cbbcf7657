// Shared-memory addresses as PTX instructions take them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxunet::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace jaxunet::cuda
