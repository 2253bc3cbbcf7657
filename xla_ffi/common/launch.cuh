// Launches, dynamic shared memory, and the architecture that is being compiled; only nvcc can
// compile this file.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/shared_memory.h"

// Defined while nvcc compiles device code for sm_90a, the only architecture with wgmma. In code for
// any other architecture the kernels that need it trap; the host does not launch them there
// (common/device.h).
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define JAXUNET_SM90A_PASS
#endif

namespace jaxunet::cuda {

// Launches a kernel and returns the error of this launch: cudaGetLastError() would also return one
// that an earlier call on this thread left behind. Takes the arguments by reference: by value,
// parameters aligned to 64 bytes, such as tensor maps, would make every frame up to the launch move
// its stack pointer by an amount known only at run time, which some tools that walk the stack
// cannot follow.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                   cudaStream_t stream, const std::common_type_t<Parameters>&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, addresses,
                          shared_bytes, stream);
}

// The same for a kernel whose blocks form clusters: `cluster` neighbours along x each.
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

// The dynamic shared memory of the block. It begins at a multiple of 1024 bytes, where the pattern
// of TMA's and wgmma's 128-byte swizzle starts.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char jaxunet_shared_memory[];
  return jaxunet_shared_memory;
}

}  // namespace jaxunet::cuda
