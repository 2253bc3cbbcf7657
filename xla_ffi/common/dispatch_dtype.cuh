// Turns the type in a plan into a kernel's template argument.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "binding/plan.h"

namespace jaxunet::cuda {

// Calls run(zero) with a zero of the given type, so that `run` can select a kernel by
// `decltype(zero)`.
template <class Run>
auto dispatch_dtype(Type type, const Run& run) {
  switch (type) {
    case Type::kFloat32:
      return run(float());
    case Type::kFloat16:
      return run(__half());
    default:
      return run(__nv_bfloat16());
  }
}

}  // namespace jaxunet::cuda
