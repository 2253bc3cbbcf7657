// Zeros in the memory of every device, for the kernels that read a shift even if there is none. An
// operand of zeros would cost each step a launch to write it.
#include "conv3x3/dispatch.h"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {

__device__ float unshifted[kMostUnshifted];

cudaError_t no_shift(Rows* shift) {
  // The first call may have to load the array. While this thread records a CUDA graph, only the
  // relaxed mode allows calls that may allocate memory.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  void* address = nullptr;
  error = cudaGetSymbolAddress(&address, unshifted);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  *shift = {static_cast<const float*>(address), 0};
  return error != cudaSuccess ? error : restored;
}

}  // namespace jaxunet::cuda
