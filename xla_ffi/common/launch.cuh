// Kernel launches, dynamic shared memory, and the architecture that is being compiled for. Only
// nvcc can compile this file.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/shared_memory.h"

// Defined while nvcc compiles device code for sm_90a, the only architecture with wgmma. Compiled
// for any other architecture, kernels that need wgmma trap; the host never launches them there
// (common/device.h).
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define JAXUNET_SM90A_PASS
#endif

namespace jaxunet::cuda {

// Launches a kernel and returns the error of this launch; cudaGetLastError() could return one that
// an earlier call on this thread left behind. Takes the arguments by reference: passed by value,
// parameters aligned to 64 bytes, such as tensor maps, make every stack frame up to the launch
// realign its stack pointer at run time, which some stack unwinders cannot follow.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                   cudaStream_t stream, const std::common_type_t<Parameters>&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, addresses,
                          shared_bytes, stream);
}

// Launches a kernel with clusters of `cluster` consecutive blocks along x.
template <class... Parameters>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, int cluster, dim3 block,
                            int shared_bytes, cudaStream_t stream,
                            const std::common_type_t<Parameters>&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), addresses);
}

// The block's dynamic shared memory. It is aligned to 1024 bytes, the period of the 128-byte
// swizzle of TMA and wgmma.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char jaxunet_shared_memory[];
  return jaxunet_shared_memory;
}

}  // namespace jaxunet::cuda
