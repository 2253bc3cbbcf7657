// Entry point of the weight gradient's handler: chooses the kernel and the number of splits of K
// (split_k.h), places the partial results, and reduces them.
//
// It takes two or three launches: channel_sums and a kernel of portable/, or only a kernel of
// hopper/ or small_channels/, which also sums dy; then split_k_reduce, which also narrows the sums
// to the type of the gradients.

#include <algorithm>

#include "common/device.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/multistage.h"

namespace jaxunet::cuda {
namespace {

// The number of splits of the kernel's gradient, and of the shortcut's.
struct Splits {
  int64_t kernel, shortcut;
};

// Where the partial results go. With one split and nothing to narrow, they are the gradient itself.
// Otherwise they are in the workspace, in this order: the kernel's gradient, the shortcut's
// gradient, and the sums of dy, which are the gradient of the shift. All sizes count floats.
struct Partials {
  const Conv3x3WeightGradient& plan;
  int64_t kernel, shortcut, shift;  // per split (shift: per slot)

  explicit Partials(const Conv3x3WeightGradient& plan_)
      : plan(plan_),
        kernel(9 * plan_.x.total * plan_.features),
        shortcut(plan_.projected.total * plan_.features),
        shift(plan_.batch * plan_.features) {}

  // True if the kernel writes the gradient itself, which needs no reduction.
  static bool direct(const Result& gradient, int64_t splits) {
    return splits == 1 && gradient.type == Type::kFloat32;
  }
  // Size of the partial results in the workspace; 0 if they are the gradient itself.
  int64_t kernel_floats(const Splits& splits) const {
    return direct(plan.dkernel, splits.kernel) ? 0 : splits.kernel * kernel;
  }
  int64_t shortcut_floats(const Splits& splits) const {
    return direct(plan.dshortcut, splits.shortcut) ? 0 : splits.shortcut * shortcut;
  }
  bool fit(const Splits& splits, int64_t slots) const {
    return kernel_floats(splits) + shortcut_floats(splits) + slots * shift <= plan.workspace_floats;
  }
  float* kernel_at(const Splits& splits) const {
    return kernel_floats(splits) ? plan.workspace : static_cast<float*>(plan.dkernel.data);
  }
  float* shortcut_at(const Splits& splits) const {
    return shortcut_floats(splits) ? plan.workspace + kernel_floats(splits)
                                   : static_cast<float*>(plan.dshortcut.data);
  }
  float* shift_at(const Splits& splits) const {
    return plan.workspace + kernel_floats(splits) + shortcut_floats(splits);
  }

  // Adds the partial results of all gradients, and the norm's sums, in one launch.
  cudaError_t reduce(const Splits& splits, bool accumulator_tiles, int64_t slots,
                     cudaStream_t stream) const {
    // If all samples share one shift, its gradient is also summed over the samples: each sample's
    // sum in a slot is then a part to add.
    const int64_t parts_of_slot = plan.shifts == 1 ? plan.batch : 1;
    // The shift first: its many parts of few entries take longest.
    return split_k_reduce({{shift_at(splits), plan.dshift, static_cast<int>(slots * parts_of_slot),
                            shift / parts_of_slot},
                           norm_parameter(0, plan.of_offset),
                           norm_parameter(1, plan.of_scale),
                           {shortcut_at(splits), plan.dshortcut, static_cast<int>(splits.shortcut),
                            shortcut_floats(splits) ? shortcut : 0},
                           {kernel_at(splits), plan.dkernel, static_cast<int>(splits.kernel),
                            kernel_floats(splits) ? kernel : 0,
                            accumulator_tiles ? static_cast<int>(plan.features) : 0}},
                          stream);
  }

  // Without pixels or features, all gradients except the norm's are zeros.
  cudaError_t reduce_nothing(cudaStream_t stream) const {
    return split_k_reduce({{nullptr, plan.dshift, 0, plan.shifts * plan.features},
                           norm_parameter(0, plan.of_offset),
                           norm_parameter(1, plan.of_scale),
                           {nullptr, plan.dshortcut, 0, shortcut},
                           {nullptr, plan.dkernel, 0, kernel}},
                          stream);
  }

 private:
  // The reduction over the samples of one of the norm's two sums: `which` is 0 for the offset's
  // gradient, 1 for the scale's. In norm_sums (batch, 2, channels) they are every second part.
  SplitKReduction norm_parameter(int which, float* to) const {
    if (!plan.norm) return {};
    SplitKReduction sum;
    sum.from = plan.norm_sums + which * plan.x.total;
    sum.to = {to, Type::kFloat32};
    sum.parts = static_cast<int>(2 * plan.batch);
    sum.count = plan.x.total;
    sum.part_stride = 2;
    return sum;
  }
};

// Number of strips in the batch.
int64_t strips_of(const WeightGradientTiling& tiling, int64_t batch) {
  return ceil_div(batch, tiling.samples) * tiling.strips_of_sample;
}

SplitK split_k_of(const WeightGradientTiling& tiling, int64_t batch, int64_t splits) {
  return {static_cast<int>(strips_of(tiling, batch)), static_cast<int>(tiling.strips_of_sample),
          static_cast<int>(splits)};
}

// Estimated times of the Hopper weight gradient, in microseconds on an H200. To refit: time the
// weight gradients of a training step with forced numbers of splits around the chosen ones, and
// solve for the three constants by least squares.
constexpr double kStripTime = 0.7;    // to multiply a strip of 64 pixels
constexpr double kBlockTime = 5;      // to start a block and to store its partial results
constexpr double kReduceTime = 0.03;  // to reduce the partial results of a block

// A choice of the tiles and of the number of splits.
struct Choice {
  WeightGradientTiling tiling;
  Splits splits;
  double microseconds = 0;  // estimated
};

// The splits with the least estimated time.
Choice hopper_splits(const WeightGradientTiling& tiling, const Partials& partials,
                     int multiprocessors) {
  const int64_t strips = strips_of(tiling, partials.plan.batch);
  const bool shortcut_alone = tiling.tiles == 0;  // a linear layer
  // n splits for the kernel's gradient, and as many for the shortcut's that blocks of both kinds
  // take equally long.
  const auto balanced = [&](int64_t n) {
    if (shortcut_alone) return Splits{1, n};
    const double shortcut = static_cast<double>(n) * tiling.shortcut_time;
    return Splits{n, std::clamp<int64_t>(static_cast<int64_t>(shortcut + 0.5), 1, strips)};
  };
  const auto microseconds = [&](const Splits& splits) {
    const int64_t blocks = tiling.tiles * splits.kernel + tiling.shortcut_tiles * splits.shortcut;
    const int64_t waves = ceil_div(blocks, multiprocessors);
    const double strips_of_block =
        shortcut_alone
            ? static_cast<double>(ceil_div(strips, splits.shortcut)) * tiling.shortcut_time
            : static_cast<double>(ceil_div(strips, splits.kernel));
    const double reduced = splits.kernel * splits.shortcut > 1 ? static_cast<double>(blocks) : 0.0;
    return static_cast<double>(waves) * (kStripTime * strips_of_block + kBlockTime) +
           kReduceTime * reduced * (shortcut_alone ? tiling.shortcut_size : 1.0);
  };
  Choice best{tiling, balanced(1), microseconds(balanced(1))};
  for (int64_t n = 2; n <= std::min(strips, int64_t{multiprocessors}); ++n) {
    const Choice choice{tiling, balanced(n), microseconds(balanced(n))};
    if (choice.microseconds < best.microseconds &&
        partials.fit(choice.splits, split_k_of(tiling, partials.plan.batch, n).slots())) {
      best = choice;
    }
  }
  return best;
}

// The tiles and splits with the least estimated time. Without x (a linear layer), tiles of fewer
// chunks may be faster if there are few pixels: they need fewer splits to occupy the device.
Choice hopper_choice(const Partials& partials, int multiprocessors) {
  const WeightGradientTiling tiling = hopper_weight_gradient_tiling(partials.plan);
  Choice best = hopper_splits(tiling, partials, multiprocessors);
  for (int chunks = tiling.block_chunks - 1; tiling.tiles == 0 && chunks > 0; --chunks) {
    const WeightGradientTiling smaller = hopper_weight_gradient_tiling(partials.plan, chunks);
    if (smaller.block_chunks < chunks) continue;  // same as a later iteration
    const Choice choice = hopper_splits(smaller, partials, multiprocessors);
    if (choice.microseconds < best.microseconds) best = choice;
  }
  return best;
}

// Two blocks per multiprocessor, if the workspace has room. To refit, time the first and the last
// layer's weight gradients with half and with twice as many.
Choice few_choice(const Partials& partials, int multiprocessors) {
  const WeightGradientTiling tiling = few_weight_gradient_tiling(partials.plan);
  const int64_t strips = strips_of(tiling, partials.plan.batch);
  int64_t splits = std::clamp<int64_t>(2 * multiprocessors / tiling.tiles, 1, strips);
  while (splits > 1 &&
         !partials.fit({splits, 1}, split_k_of(tiling, partials.plan.batch, splits).slots()))
    --splits;
  return {tiling, {splits, 1}};
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
  float *const kernel = partials.kernel_at(splits), *const shortcut = partials.shortcut_at(splits);
  cudaError_t error =
      channel_sums(plan, static_cast<int>(segments), partials.shift_at(splits), stream);
  if (error != cudaSuccess) return error;
  error = multistage
              ? multistage_weight_gradient(plan, choice.tile, count, kernel, shortcut, stream)
              : implicit_gemm_weight_gradient(plan, count, kernel, shortcut, stream);
  return error == cudaSuccess ? partials.reduce(splits, false, segments, stream) : error;
}

}  // namespace

cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream,
                                    KernelSet kernels) {
  Device device;
  cudaError_t error = describe(kernels, &device);
  if (error != cudaSuccess) return error;
  const Partials partials(plan);
  if (plan.batch * plan.height * plan.width == 0 || plan.features == 0)
    return partials.reduce_nothing(stream);
  const Kernel kernel = weight_gradient_kernel(plan, device.hopper);
  const bool multistage = kernel == Kernel::kMultistage;
  if (multistage || kernel == Kernel::kImplicitGemm)
    return run_portable(partials, multistage, device.multiprocessors, stream);
  const bool hopper = kernel == Kernel::kHopper;
  const Choice choice = hopper ? hopper_choice(partials, device.multiprocessors)
                               : few_choice(partials, device.multiprocessors);
  const WeightGradientTiling& tiling = choice.tiling;
  const Splits& splits = choice.splits;
  const SplitK split_k = split_k_of(tiling, plan.batch, splits.kernel),
               shortcut_split_k = split_k_of(tiling, plan.batch, splits.shortcut);
  const ShiftPartials shift{partials.shift_at(splits),
                            (tiling.tiles > 0 ? split_k : shortcut_split_k).slots(),
                            static_cast<int>(plan.batch), static_cast<int>(plan.features)};
  // Only if there is a reduction to read them; otherwise the kernel writes the gradient itself.
  const bool accumulator_tiles = tiling.whole_tiles && partials.kernel_floats(splits) > 0;
  error = hopper ? hopper_weight_gradient(plan, tiling, split_k, partials.kernel_at(splits),
                                          accumulator_tiles, shift, shortcut_split_k,
                                          partials.shortcut_at(splits), stream)
                 : few_weight_gradient(plan, split_k, partials.kernel_at(splits), shift, stream);
  return error == cudaSuccess ? partials.reduce(splits, accumulator_tiles, shift.slots, stream)
                              : error;
}

}  // namespace jaxunet::cuda
