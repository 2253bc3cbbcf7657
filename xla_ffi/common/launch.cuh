// What only nvcc can read: launches, dynamic shared memory, and which architecture is being compiled.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

// Code for wgmma compiles for sm_90a alone; the other architectures get empty kernels, which the host never launches
// there.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define JAXUNET_HOPPER
#endif

namespace jaxunet::cuda {

// The arguments are passed on by their addresses: by value, parameters that are aligned to 64 bytes, as the copy
// engine's maps are, would have every frame up to the launch move its stack pointer by an amount unknown before the
// run, which not every tool that walks the stack at a launch can follow.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   const std::common_type_t<Parameters>&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), addresses, shared_bytes, stream);
}

// The shared memory whose size the launch names.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char jaxunet_shared_memory[];
  return jaxunet_shared_memory;
}

template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace jaxunet::cuda
