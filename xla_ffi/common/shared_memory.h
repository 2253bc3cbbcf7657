// How much dynamic shared memory a kernel may have.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxunet::cuda {

// Permits launches of a kernel on the current device with so much dynamic shared memory; 48 KB need
// no permission. The limit is only ever raised, and any thread may call this at any time: a launch
// never finds less than it was permitted.
cudaError_t allow_shared_memory(const void* kernel, int bytes);

template <class... Parameters>
cudaError_t allow_shared_memory(void (*kernel)(Parameters...), int bytes) {
  return allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace jaxunet::cuda
