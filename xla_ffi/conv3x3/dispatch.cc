// Entry points of the handlers that return images: each plan goes to the kernel that dispatch.h
// chooses. The entry point of the weight gradient is in weight_gradient.cc.

#include "conv3x3/dispatch.h"

#include <stdexcept>

#include "common/device.h"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/multistage.h"

namespace jaxunet::cuda {
namespace {

template <class Plan>
cudaError_t by_phases(const Plan& plan, cudaStream_t stream, KernelSet kernels,
                      cudaError_t (*run)(const Plan&, int, cudaStream_t)) {
  Device device;
  const cudaError_t error = describe(kernels, &device);
  if (error != cudaSuccess) return error;
  if (!takes_upsampled(plan, device.hopper)) {
    throw std::runtime_error(
        "expected the Hopper kernels, a 16-bit type, channels and features in multiples of 64, and "
        "small images of at least 4 x 4 pixels");
  }
  return run(plan, device.multiprocessors, stream);
}

// Runs a kernel for few channels or few features, which reads a shift even if there is none.
cudaError_t few_forward(Conv3x3 plan, Kernel kernel, int multiprocessors, cudaStream_t stream) {
  if (!plan.shift.data) {
    const cudaError_t error = no_shift(&plan.shift);
    if (error != cudaSuccess) return error;
  }
  return kernel == Kernel::kFewChannels ? few_channels_forward(plan, multiprocessors, stream)
                                        : few_features_forward(plan, multiprocessors, stream);
}

}  // namespace

cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream, KernelSet kernels) {
  Device device;
  const cudaError_t error = describe(kernels, &device);
  if (error != cudaSuccess) return error;
  const Kernel kernel = forward_kernel(plan, device.hopper);
  if (plan.wide && kernel != Kernel::kHopper) {
    throw std::runtime_error(
        "y: float32 results of bfloat16 images need the Hopper kernels, no activation, a residual "
        "in "
        "one array, channels in multiples of 8 and images of at least 4 x 4 pixels");
  }
  switch (kernel) {
    case Kernel::kFewChannels:
    case Kernel::kFewFeatures:
      return few_forward(plan, kernel, device.multiprocessors, stream);
    case Kernel::kHopper:
      return hopper_forward(plan, device.multiprocessors, stream);
    case Kernel::kMultistage:
      return multistage_forward(plan, multistage_tile(plan, device.multiprocessors), stream);
    default:
      return implicit_gemm_forward(plan, stream);
  }
}

cudaError_t conv3x3_shortcut_gradient(const Conv3x3& plan, cudaStream_t stream, KernelSet kernels) {
  Device device;
  cudaError_t error = describe(kernels, &device);
  if (error != cudaSuccess) return error;
  if (in_one_launch(plan, device.hopper))
    return hopper_forward(plan, device.multiprocessors, stream);
  int64_t first = 0;
  for (int i = 0; i < plan.y.count && error == cudaSuccess; ++i) {
    Conv3x3 part = plan;
    part.features = plan.y.channels[i];
    part.y = {1, {plan.y.data[i]}, {part.features}, part.features};
    // The part's rows of the shortcut, which is (features, projected channels).
    part.shortcut = static_cast<const char*>(plan.shortcut) +
                    first * plan.projected.total * (plan.type == Type::kFloat32 ? 4 : 2);
    error = conv3x3(part, stream, kernels);
    first += part.features;
  }
  return error;
}

cudaError_t conv3x3_upsampled(const UpsampledConv3x3& plan, cudaStream_t stream,
                              KernelSet kernels) {
  return by_phases(plan, stream, kernels, hopper_upsampled);
}

cudaError_t conv3x3_upsampled_weight_gradient(const UpsampledWeightGradient& plan,
                                              cudaStream_t stream, KernelSet kernels) {
  return by_phases(plan, stream, kernels, hopper_upsampled_weight_gradient);
}

}  // namespace jaxunet::cuda
