#include <cuda_runtime_api.h>

#include "adamw/kernels.h"
#include "attention/kernels.h"
#include "conv3x3/kernels.h"
#include "group_norm/kernels.h"
#include "handler.h"

namespace jaxunet {
namespace {

// The statically linked runtime works with drivers of its own major version and later.
constexpr int kNeededDriver = CUDART_VERSION / 1000 * 1000;

// Command-buffer compatible: a run only launches kernels on the given stream.
template <const char* op, auto read, auto run>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* const bound = ffi::Ffi::Bind()
                                 .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                 .RemainingArgs()
                                 .RemainingRets()
                                 .Attrs()
                                 .To(
                                     [](cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                        ffi::Dictionary attributes) {
                                       return checked(op, operands, results, attributes, read, [&](const auto& plan) {
                                         const cudaError_t error = run(plan, stream);
                                         if (error == cudaSuccess) return ffi::Error::Success();
                                         std::string message = std::string(op) + ": CUDA: " + cudaGetErrorString(error);
                                         int driver = 0;
                                         if (cudaDriverGetVersion(&driver) == cudaSuccess && driver < kNeededDriver) {
                                           message += "; the driver is for CUDA " + std::to_string(driver / 1000) +
                                                      ", the kernels were built for CUDA " +
                                                      std::to_string(kNeededDriver / 1000) + ": update the driver";
                                         }
                                         return ffi::Error::Internal(message);
                                       });
                                     },
                                     {ffi::Traits::kCmdBufferCompatible})
                                 .release();
  return bound->Call(frame);
}

constexpr char kSumOfSquares[] = "jaxunet_sum_of_squares";
constexpr char kAdamW[] = "jaxunet_adamw";
constexpr char kAttentionForward[] = "jaxunet_attention_forward";
constexpr char kAttentionBackward[] = "jaxunet_attention_backward";
constexpr char kConv3x3[] = "jaxunet_conv3x3";
constexpr char kConv3x3WeightGradient[] = "jaxunet_conv3x3_weight_gradient";
constexpr char kNormForward[] = "jaxunet_group_norm_forward";
constexpr char kNormStatistics[] = "jaxunet_group_norm_statistics";
constexpr char kNormApply[] = "jaxunet_group_norm_apply";
constexpr char kNormGradient[] = "jaxunet_group_norm_gradient";

pybind11::dict registrations() {
  pybind11::dict all;
  all[kSumOfSquares] = capsule(handler<kSumOfSquares, read_sum_of_squares, cuda::sum_of_squares>);
  all[kAdamW] = capsule(handler<kAdamW, read_adamw, cuda::adamw>);
  all[kAttentionForward] = capsule(handler<kAttentionForward, read_attention_forward, cuda::attention_forward>);
  all[kAttentionBackward] = capsule(handler<kAttentionBackward, read_attention_backward, cuda::attention_backward>);
  all[kConv3x3] = capsule(handler<kConv3x3, read_conv3x3, cuda::conv3x3>);
  all[kConv3x3WeightGradient] =
      capsule(handler<kConv3x3WeightGradient, read_conv3x3_weight_gradient, cuda::conv3x3_weight_gradient>);
  all[kNormForward] = capsule(handler<kNormForward, read_norm_forward, cuda::norm_forward>);
  all[kNormStatistics] = capsule(handler<kNormStatistics, read_norm_statistics, cuda::norm_statistics>);
  all[kNormApply] = capsule(handler<kNormApply, read_norm_apply, cuda::norm_apply>);
  all[kNormGradient] = capsule(handler<kNormGradient, read_norm_gradient, cuda::norm_gradient>);
  return all;
}

// What the driver supports, as CUDART_VERSION counts: 0 without one.
int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace
}  // namespace jaxunet

PYBIND11_MODULE(_cuda, module) {
  module.def("registrations", &jaxunet::registrations, "Target name -> handler capsule.");
  module.def("driver_version", &jaxunet::driver_version,
             "The CUDA version that the driver supports, as 13000 for 13.0; 0 without one.");
  module.attr("needed_driver") = jaxunet::kNeededDriver;  // the least that these handlers run with
}
