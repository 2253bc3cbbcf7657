// The Hopper attention kernels for bfloat16.
#include "attention/hopper/shapes.cuh"

namespace jaxunet::cuda {

template <>
std::optional<cudaError_t> hopper_attention_forward<Type::kBfloat16>(const AttentionForward& plan,
                                                                     int multiprocessors,
                                                                     cudaStream_t stream) {
  return hopper_attention::dispatch_forward<__nv_bfloat16>(plan, multiprocessors, stream);
}

template <>
std::optional<cudaError_t> hopper_attention_backward<Type::kBfloat16>(const AttentionBackward& plan,
                                                                      int multiprocessors,
                                                                      cudaStream_t stream) {
  return hopper_attention::dispatch_backward<__nv_bfloat16>(plan, multiprocessors, stream);
}

}  // namespace jaxunet::cuda
