// From the type that a plan names to the type of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "binding/plan.h"

namespace jaxunet::cuda {

// run(nought), of the type whose kernel is wanted: `decltype(nought)`.
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
