// The Python module _cuda: handlers that launch the CUDA kernels, and what this build requires of a
// machine.
#include <cuda_runtime_api.h>

#include "adamw/kernels.h"
#include "attention/kernels.h"
#include "binding/handler.h"
#include "conv3x3/kernels.h"
#include "group_norm/kernels.h"
#include "linear/kernels.h"
#include "projections/kernels.h"
#include "weight_gradients/kernels.h"

namespace jaxunet {
namespace {

// The statically linked CUDA runtime works with drivers for its own major version or later.
constexpr int kNeededDriver = CUDART_VERSION / 1000 * 1000;

// Turns the status of a launch into the result of the call.
ffi::Error status(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  std::string message = std::string(op) + ": CUDA: " + cudaGetErrorString(error);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver < kNeededDriver) {
    message += "; the driver is for CUDA " + std::to_string(driver / 1000) +
               ", the kernels were built for CUDA " + std::to_string(kNeededDriver / 1000) +
               ": update the driver";
  }
  return ffi::Error::Internal(message);
}

// The handler of one target. Its binding is created at the first call and never destroyed. It is
// compatible with command buffers, because a call only launches kernels on the given stream.
template <const char* op, auto read, auto run>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  const auto call = [](cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       ffi::Dictionary attributes) {
    return checked(op, operands, results, attributes, read,
                   [&](const auto& plan, KernelSet kernels) {
                     return status(op, run(plan, stream, kernels));
                   });
  };
  static auto* const bound = ffi::Ffi::Bind()
                                 .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                 .RemainingArgs()
                                 .RemainingRets()
                                 .Attrs()
                                 .To(call, {ffi::Traits::kCmdBufferCompatible})
                                 .release();
  return bound->Call(frame);
}

pybind11::dict registrations() {
  pybind11::dict all;
#define JAXUNET_REGISTER(TARGET, NAME)                               \
  {                                                                  \
    static constexpr char target[] = #TARGET;                        \
    all[target] = capsule(handler<target, read_##NAME, cuda::NAME>); \
  }
  JAXUNET_HANDLERS(JAXUNET_REGISTER)
#undef JAXUNET_REGISTER
  return all;
}

// The CUDA version that the driver supports, such as 13000; 0 without a driver.
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
  // The lowest driver version that these handlers run with.
  module.attr("needed_driver") = jaxunet::kNeededDriver;
  // In CMake's notation, joined by commas.
  module.attr("architectures") = JAXUNET_ARCHITECTURES;
}
