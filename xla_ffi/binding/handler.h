// Shared by the handlers of both Python modules (cpu_module.cc, cuda_module.cc). A handler is the
// function that XLA runs for a custom call of a program: it reads and checks the call, then
// executes it.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "binding/reader.h"

namespace jaxunet {

// Runs one call of `op`: plan = read(reader), then run(plan, kernels), which returns an ffi::Error.
// Every failure becomes an XLA error: InvalidArgument for an InvalidCall, Internal for all others.
template <class Read, class Run>
ffi::Error checked(const char* op, const ffi::RemainingArgs& operands,
                   const ffi::RemainingRets& results, const ffi::Dictionary& attributes, Read read,
                   Run run) {
  try {
    Reader call(op, operands, results, attributes);
    const KernelSet kernels = call.kernels();
    const auto plan = read(call);
    call.finish();
    return run(plan, kernels);
  } catch (const InvalidCall& invalid) {
    return ffi::Error::InvalidArgument(invalid.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string(op) + ": " + error.what());
  }
}

// The list of all handlers: ENTRY(target, NAME). `target` is the handler's name in XLA; read_NAME
// reads a call into a plan (OP/plan.h); cpu::NAME and cuda::NAME run it.
#define JAXUNET_HANDLERS(ENTRY)                                                       \
  ENTRY(jaxunet_sum_of_squares, sum_of_squares)                                       \
  ENTRY(jaxunet_adamw, adamw)                                                         \
  ENTRY(jaxunet_narrow, narrow_all)                                                   \
  ENTRY(jaxunet_pack, pack)                                                           \
  ENTRY(jaxunet_attention_forward, attention_forward)                                 \
  ENTRY(jaxunet_attention_backward, attention_backward)                               \
  ENTRY(jaxunet_conv3x3, conv3x3)                                                     \
  ENTRY(jaxunet_conv3x3_shortcut_gradient, conv3x3_shortcut_gradient)                 \
  ENTRY(jaxunet_conv3x3_upsampled, conv3x3_upsampled)                                 \
  ENTRY(jaxunet_conv3x3_weight_gradient, conv3x3_weight_gradient)                     \
  ENTRY(jaxunet_conv3x3_upsampled_weight_gradient, conv3x3_upsampled_weight_gradient) \
  ENTRY(jaxunet_linear, linear)                                                       \
  ENTRY(jaxunet_linear_weight_gradient, linear_weight_gradient)                       \
  ENTRY(jaxunet_weight_gradients, weight_gradients)                                   \
  ENTRY(jaxunet_projections, projections)                                             \
  ENTRY(jaxunet_projection_gradients, projection_gradients)                           \
  ENTRY(jaxunet_group_norm_forward, norm_forward)                                     \
  ENTRY(jaxunet_group_norm_dropout_forward, norm_dropout_forward)                     \
  ENTRY(jaxunet_group_norm_statistics, norm_statistics)                               \
  ENTRY(jaxunet_group_norm_gradient, norm_gradient)                                   \
  ENTRY(jaxunet_group_norm_dropout_gradient, norm_dropout_gradient)

// A handler in the form that jax.ffi.register_ffi_target takes.
inline pybind11::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return pybind11::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace jaxunet
