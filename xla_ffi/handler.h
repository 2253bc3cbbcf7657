// The one handler: reads and checks a call, then runs it; every failure becomes an XLA error.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "reader.h"

namespace jaxunet {

template <class Read, class Run>
ffi::Error checked(const char* op, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                   const ffi::Dictionary& attributes, Read read, Run run) {
  try {
    Reader call(op, operands, results, attributes);
    const auto plan = read(call);
    call.finish();
    return run(plan);
  } catch (const Mistake& mistake) {
    return ffi::Error::InvalidArgument(mistake.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string(op) + ": " + error.what());
  }
}

inline pybind11::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return pybind11::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace jaxunet
