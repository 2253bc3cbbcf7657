// The flash kernels for bfloat16.
#include "flash_shapes.cuh"

namespace jaxunet::cuda {

template <>
std::optional<cudaError_t> flash_forward<Type::kBfloat16>(const AttentionForward& plan,
                                                          int shared_bytes, cudaStream_t stream) {
  return dispatch_forward<__nv_bfloat16>(plan, shared_bytes, stream);
}

template <>
std::optional<cudaError_t> flash_backward<Type::kBfloat16>(const AttentionBackward& plan,
                                                           int shared_bytes, cudaStream_t stream) {
  return dispatch_backward<__nv_bfloat16>(plan, shared_bytes, stream);
}

}  // namespace jaxunet::cuda
