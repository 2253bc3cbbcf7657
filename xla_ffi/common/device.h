// The properties of the current device and of this build on which the choice of a kernel depends.
// No other file asks the device for its capability or its shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "common/kernel_set.h"

namespace jaxunet::cuda {

// CMake defines JAXUNET_BUILT_FOR_SM90A if it compiles code for sm_90a, which wgmma and setmaxnreg
// need. In code for other architectures the Hopper kernels only trap (launch.cuh).
#ifdef JAXUNET_BUILT_FOR_SM90A
constexpr bool kBuiltForSm90a = true;
#else
constexpr bool kBuiltForSm90a = false;
#endif

// Describes what kernels of a set may use of this thread's current device, which is that of the
// handler's stream: XLA activates its context before it runs a program.
inline cudaError_t describe(KernelSet kernels, Device* device) {
  int id = 0, major = 0, sms = 0, smem_bytes = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  *device = limited({sms, smem_bytes, kBuiltForSm90a && major == 9}, kernels);
  return error;
}

}  // namespace jaxunet::cuda
