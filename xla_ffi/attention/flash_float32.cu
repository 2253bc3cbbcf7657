// The flash kernels for float32.
#include "flash_shapes.cuh"

namespace jaxunet::cuda {

template <>
std::optional<cudaError_t> flash_forward<Type::kFloat32>(const AttentionForward& plan,
                                                         int shared_bytes, cudaStream_t stream) {
  return dispatch_forward<float>(plan, shared_bytes, stream);
}

template <>
std::optional<cudaError_t> flash_backward<Type::kFloat32>(const AttentionBackward& plan,
                                                          int shared_bytes, cudaStream_t stream) {
  return dispatch_backward<float>(plan, shared_bytes, stream);
}

}  // namespace jaxunet::cuda
