// What only nvcc can read: launches, dynamic shared memory, and which architecture is being compiled.
#pragma once

#include <cuda_runtime.h>

// Code for wgmma compiles for sm_90a alone; the other architectures get empty kernels, which the host never launches
// there.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define JAXUNET_HOPPER
#endif

namespace jaxunet::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  kernel<<<grid, threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
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
