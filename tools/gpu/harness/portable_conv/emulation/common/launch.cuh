// Replaces xla_ffi/common/launch.cuh in the emulation.
#pragma once

#include "threads.h"

#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace jaxunet::cuda {

template <class Parameters>
cudaError_t launch(void (*kernel)(Parameters), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t, const Parameters& parameters) {
  emulation::run([&] { kernel(parameters); }, grid, threads, shared_bytes);
  return cudaSuccess;
}

template <class Kernel>
cudaError_t allow_shared_memory(Kernel, int) {
  return cudaSuccess;
}

inline unsigned char* shared_memory() {
  return reinterpret_cast<unsigned char*>(emulation::self->block->base());
}

}  // namespace jaxunet::cuda
