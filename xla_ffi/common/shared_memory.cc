#include "common/shared_memory.h"

#include <map>
#include <mutex>
#include <utility>

namespace jaxunet::cuda {

cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> limits;  // by device and kernel
  int device = 0;
  const cudaError_t found = cudaGetDevice(&device);
  if (found != cudaSuccess) return found;
  const std::lock_guard<std::mutex> lock(mutex);
  int& limit = limits[{device, kernel}];
  if (bytes <= limit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) limit = bytes;
  return error;
}

}  // namespace jaxunet::cuda
