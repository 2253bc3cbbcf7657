// The limit of a kernel's dynamic shared memory.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxunet::cuda {

// Permits launches of a kernel on the current device with this much dynamic shared memory; 48 KB
// need no permission. The limit is only raised, so any thread may call this at any time without
// taking shared memory from another thread's launch.
cudaError_t allow_shared_memory(const void* kernel, int bytes);

template <class... Parameters>
cudaError_t allow_shared_memory(void (*kernel)(Parameters...), int bytes) {
  return allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace jaxunet::cuda
