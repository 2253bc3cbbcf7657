// The flash kernels for float16.
#include "flash_shapes.cuh"

namespace jaxunet::cuda {

template <>
std::optional<cudaError_t> flash_forward<Type::kFloat16>(const AttentionForward& plan,
                                                         int shared_bytes, cudaStream_t stream) {
  return dispatch_forward<__half>(plan, shared_bytes, stream);
}

template <>
std::optional<cudaError_t> flash_backward<Type::kFloat16>(const AttentionBackward& plan,
                                                          int shared_bytes, cudaStream_t stream) {
  return dispatch_backward<__half>(plan, shared_bytes, stream);
}

}  // namespace jaxunet::cuda
