// The properties of the current device and of this build that decide which kernels can run. No
// other file queries the device's compute capability or shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "common/kernel_set.h"

namespace jaxunet::cuda {

// CMake defines JAXUNET_BUILT_FOR_SM90A if it compiles code for sm_90a, which wgmma and setmaxnreg
// need. Compiled for other architectures, the Hopper kernels only trap (launch.cuh).
#ifdef JAXUNET_BUILT_FOR_SM90A
constexpr bool kBuiltForSm90a = true;
#else
constexpr bool kBuiltForSm90a = false;
#endif

// Describes this thread's current device as far as kernels of a set may use it. The current device
// is that of the handler's stream, because XLA activates its context before it runs a program.
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
