// The properties of the current device and of this build on which the choice of a kernel depends.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxunet::cuda {

// CMake defines JAXUNET_BUILT_FOR_SM90A if it compiles code for sm_90a, which wgmma and setmaxnreg
// need. In all other code the Hopper kernels have no bodies (launch.cuh).
#ifdef JAXUNET_BUILT_FOR_SM90A
constexpr bool kBuiltForSm90a = true;
#else
constexpr bool kBuiltForSm90a = false;
#endif

struct Device {
  int multiprocessors = 0;
  bool hopper = false;  // runs the Hopper kernels: wgmma exists in compute capability 9.0 alone
};

// Describes the current device of this thread.
inline cudaError_t describe(Device* device) {
  int id = 0, major = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
  }
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  device->hopper = kBuiltForSm90a && major == 9;
  return error;
}

}  // namespace jaxunet::cuda
