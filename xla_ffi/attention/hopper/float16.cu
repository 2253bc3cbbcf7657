// The Hopper attention kernels for float16.
#include "attention/hopper/shapes.cuh"

namespace jaxunet::cuda {

template <>
std::optional<cudaError_t> hopper_attention_forward<Type::kFloat16>(const AttentionForward& plan,
                                                                    int multiprocessors,
                                                                    cudaStream_t stream) {
  return hopper_attention::dispatch_forward<__half>(plan, multiprocessors, stream);
}

template <>
std::optional<cudaError_t> hopper_attention_backward<Type::kFloat16>(const AttentionBackward& plan,
                                                                     int multiprocessors,
                                                                     cudaStream_t stream) {
  return hopper_attention::dispatch_backward<__half>(plan, multiprocessors, stream);
}

}  // namespace jaxunet::cuda
