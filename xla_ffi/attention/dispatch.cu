// Chooses the attention kernels: flash if they support the shape (flash_shapes.cuh), else simple.
#include <cuda_runtime_api.h>

#include <optional>

#include "flash.h"
#include "kernels.h"
#include "simple.h"

namespace jaxunet::cuda {
namespace {

// Bytes of shared memory that a block may have on this device.
cudaError_t shared_memory_of_device(int* bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// flash(bytes of shared memory) returns nothing where the flash kernels do not take the plan.
template <class Plan, class Flash, class Simple>
cudaError_t dispatch(const Plan& plan, Flash flash, Simple simple) {
  if (plan.batch * plan.heads * plan.tokens * plan.width == 0) return cudaSuccess;
  int bytes = 0;
  const cudaError_t error = shared_memory_of_device(&bytes);
  if (error != cudaSuccess) return error;
  const std::optional<cudaError_t> done = flash(bytes);
  return done ? *done : simple();
}

}  // namespace

cudaError_t attention_forward(const AttentionForward& plan, cudaStream_t stream) {
  const auto flash = [&](int bytes) {
    switch (plan.type) {
      case Type::kFloat32:
        return flash_forward<Type::kFloat32>(plan, bytes, stream);
      case Type::kFloat16:
        return flash_forward<Type::kFloat16>(plan, bytes, stream);
      default:
        return flash_forward<Type::kBfloat16>(plan, bytes, stream);
    }
  };
  return dispatch(plan, flash, [&] { return simple_attention_forward(plan, stream); });
}

cudaError_t attention_backward(const AttentionBackward& plan, cudaStream_t stream) {
  const auto flash = [&](int bytes) {
    switch (plan.type) {
      case Type::kFloat32:
        return flash_backward<Type::kFloat32>(plan, bytes, stream);
      case Type::kFloat16:
        return flash_backward<Type::kFloat16>(plan, bytes, stream);
      default:
        return flash_backward<Type::kBfloat16>(plan, bytes, stream);
    }
  };
  return dispatch(plan, flash, [&] { return simple_attention_backward(plan, stream); });
}

}  // namespace jaxunet::cuda
