// The limit of a kernel's dynamic shared memory.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxunet::cuda {

// Allows launches of a kernel on the current device with this much dynamic shared memory; up to 48
// KB need no call. It never lowers a kernel's limit, so it cannot break another thread's launch.
cudaError_t allow_shared_memory(const void* kernel, int bytes);

template <class... Parameters>
cudaError_t allow_shared_memory(void (*kernel)(Parameters...), int bytes) {
  return allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace jaxunet::cuda
