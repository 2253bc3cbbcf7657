// Chooses the attention kernels of a call: the first in this list that accept it.
//   hopper/     wgmma and TMA: GPUs of compute capability 9.0, unless the kernel set excludes them;
//               16-bit types, the heads in hopper/shapes.cuh
//   flash_*     mma.sync: heads of at most 256 channels, a multiple of 8 (flash_takes), whose tiles
//               fit the shared memory that the kernel set may use
//   simple.cu   ordinary float32 arithmetic: everything else
#include <cuda_runtime_api.h>

#include <optional>
#include <type_traits>

#include "attention/hopper/launch.h"
#include "common/device.h"
#include "flash.h"
#include "kernels.h"
#include "simple.h"

namespace jaxunet::cuda {
namespace {

// Calls visit(type) with the type as a std::integral_constant.
template <class Visit>
auto dispatch_type(Type type, Visit visit) {
  switch (type) {
    case Type::kFloat32:
      return visit(std::integral_constant<Type, Type::kFloat32>());
    case Type::kFloat16:
      return visit(std::integral_constant<Type, Type::kFloat16>());
    default:
      return visit(std::integral_constant<Type, Type::kBfloat16>());
  }
}

// Calls hopper(type, multiprocessors), flash(type, bytes of shared memory) and simple() in this
// order until one accepts the plan; the first two return nothing if they do not. An empty plan
// launches nothing.
template <class Plan, class Hopper, class Flash, class Simple>
cudaError_t dispatch(const Plan& plan, KernelSet kernels, Hopper hopper, Flash flash,
                     Simple simple) {
  if (plan.batch * plan.heads * plan.tokens * plan.width == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = describe(kernels, &device);
  if (error != cudaSuccess) return error;
  const auto done = dispatch_type(plan.type, [&](auto type) -> std::optional<cudaError_t> {
    if constexpr (type != Type::kFloat32) {
      const auto on_hopper =
          device.hopper ? hopper(type, device.multiprocessors) : std::optional<cudaError_t>();
      if (on_hopper) return on_hopper;
    }
    return flash(type, device.smem_bytes);
  });
  return done ? *done : simple();
}

}  // namespace

cudaError_t attention_forward(const AttentionForward& plan, cudaStream_t stream,
                              KernelSet kernels) {
  return dispatch(
      plan, kernels,
      [&](auto type, int multiprocessors) {
        return hopper_attention_forward<type>(plan, multiprocessors, stream);
      },
      [&](auto type, int bytes) { return flash_forward<type>(plan, bytes, stream); },
      [&] { return simple_attention_forward(plan, stream); });
}

cudaError_t attention_backward(const AttentionBackward& plan, cudaStream_t stream,
                               KernelSet kernels) {
  return dispatch(
      plan, kernels,
      [&](auto type, int multiprocessors) {
        return hopper_attention_backward<type>(plan, multiprocessors, stream);
      },
      [&](auto type, int bytes) { return flash_backward<type>(plan, bytes, stream); },
      [&] { return simple_attention_backward(plan, stream); });
}

}  // namespace jaxunet::cuda
