// Entry point of the weight gradient's handler: chooses the kernel and the number of splits of K
// (split_k.h; for Hopper, hopper/splits.h), and reduces the partial results (partials.h).
//
// It takes two or three launches: channel_sums and a kernel of portable/, or only a kernel of
// hopper/ or small_channels/, which also sums dy; then split_k_reduce, which also narrows the sums
// to the type of the gradients.

#include <algorithm>

#include "common/device.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/splits.h"
#include "conv3x3/kernels.h"
#include "conv3x3/partials.h"
#include "conv3x3/portable/multistage.h"

namespace jaxunet::cuda {
namespace {

// Runs the weight gradient of a layer with few channels or features. Two blocks per multiprocessor,
// if the workspace has room. To refit, time the first and the last layer's weight gradients with
// half and with twice as many.
cudaError_t run_few(const Partials& partials, int multiprocessors, cudaStream_t stream) {
  const Conv3x3WeightGradient& plan = partials.plan;
  const WeightGradientTiling tiling = few_weight_gradient_tiling(plan);
  const auto split_k = [&](int64_t n) { return split_k_of(tiling, plan.batch, n); };
  int64_t n =
      std::clamp<int64_t>(2 * multiprocessors / tiling.tiles, 1, strips_of(tiling, plan.batch));
  while (n > 1 && !partials.fit({n, 1}, split_k(n).slots())) --n;
  const Splits splits{n, 1};
  const ShiftPartials shift{partials.shift_at(splits), split_k(n).slots(),
                            static_cast<int>(plan.batch), static_cast<int>(plan.features)};
  const cudaError_t error = few_weight_gradient(
      plan, split_k(n), Partials::floats_at(partials.kernel_at(splits)), shift, stream);
  return error == cudaSuccess
             ? split_k_reduce(partials.reductions(splits, false, shift.slots), stream)
             : error;
}

// The number of segments per sample for channel_sums, which sums dy for the kernels of portable/:
// enough to give each multiprocessor two blocks of at least 256 pixels, if the workspace has room.
int64_t segments_of(const Partials& partials, int multiprocessors) {
  const Conv3x3WeightGradient& plan = partials.plan;
  const int64_t segments =
      std::clamp<int64_t>(2 * multiprocessors / (plan.batch * ceil_div(plan.features, 64)), 1,
                          ceil_div(plan.height * plan.width, 256));
  return partials.fit({1, 1}, segments) ? segments : 1;
}

// The largest number of splits, up to `most`, for which the workspace has room.
int64_t splits_that_fit(const Partials& partials, int64_t most, int64_t segments) {
  const int64_t room = partials.plan.workspace_floats - segments * partials.shift,
                of_one = partials.kernel + partials.shortcut;
  return std::clamp<int64_t>(room / of_one, 1, most);
}

// Four blocks of the implicit GEMM per multiprocessor, with at least 256 pixels each.
int64_t implicit_gemm_splits(const Partials& partials, int multiprocessors, int64_t segments) {
  const Conv3x3WeightGradient& plan = partials.plan;
  constexpr int64_t kTile = 64, kMinPixels = 256;  // features and rows per block; pixels per split
  const int64_t tiles = ceil_div(9 * plan.x.total + plan.projected.total, kTile) *
                        ceil_div(plan.features, kTile),
                pixels = plan.batch * plan.height * plan.width;
  return splits_that_fit(
      partials, std::clamp<int64_t>(4 * multiprocessors / tiles, 1, ceil_div(pixels, kMinPixels)),
      segments);
}

// Runs the weight gradient with the kernels of portable/. To refit the numbers of blocks and pixels
// above, time the weight gradients with JAXUNET_KERNELS=portable and half and twice as many.
cudaError_t run_portable(const Partials& partials, bool multistage, int multiprocessors,
                         cudaStream_t stream) {
  const Conv3x3WeightGradient& plan = partials.plan;
  const int64_t segments = segments_of(partials, multiprocessors);
  MultistageChoice choice;
  if (multistage) {
    const int64_t most = splits_that_fit(partials, 4 * int64_t{multiprocessors}, segments);
    choice = multistage_choice(plan, multiprocessors, most);
  } else {
    choice.splits = implicit_gemm_splits(partials, multiprocessors, segments);
  }
  const Splits splits{choice.splits, choice.splits};
  const int count = static_cast<int>(choice.splits);
  float* const kernel = Partials::floats_at(partials.kernel_at(splits));
  float* const shortcut = Partials::floats_at(partials.shortcut_at(splits));
  cudaError_t error =
      channel_sums(plan, static_cast<int>(segments), partials.shift_at(splits), stream);
  if (error != cudaSuccess) return error;
  error = multistage
              ? multistage_weight_gradient(plan, choice.tile, count, kernel, shortcut, stream)
              : implicit_gemm_weight_gradient(plan, count, kernel, shortcut, stream);
  return error == cudaSuccess ? split_k_reduce(partials.reductions(splits, false, segments), stream)
                              : error;
}

}  // namespace

cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream,
                                    KernelSet kernels) {
  Device device;
  cudaError_t error = describe(kernels, &device);
  if (error != cudaSuccess) return error;
  const Partials partials(plan);
  if (plan.batch * plan.height * plan.width == 0 || plan.features == 0)
    return split_k_reduce(partials.reductions_of_nothing(), stream);
  switch (const Kernel kernel = weight_gradient_kernel(plan, device.hopper)) {
    case Kernel::kMultistage:
    case Kernel::kImplicitGemm:
      return run_portable(partials, kernel == Kernel::kMultistage, device.multiprocessors, stream);
    case Kernel::kHopper: {
      const Partials own(plan, true);
      const Choice choice = hopper_choice(own, device.multiprocessors);
      error = hopper_weight_gradients({hopper_gradient(own, choice)}, stream);
      return error == cudaSuccess ? split_k_reduce(hopper_reductions(own, choice), stream) : error;
    }
    default:
      return run_few(partials, device.multiprocessors, stream);
  }
}

}  // namespace jaxunet::cuda
