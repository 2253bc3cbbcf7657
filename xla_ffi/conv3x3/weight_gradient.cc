// The handler's entry of the weight gradient: the choice of the kernel and of the number of splits
// of K, the place of partial results, and their reduction.

#include <algorithm>

#include "common/device.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace {

// The number of splits.
struct Splits {
  int64_t kernel, shortcut;
};

// The place of partial results. With one split and nothing to narrow, they are the result itself;
// else they are in the workspace: the kernel's, the shortcut's, then those of dy, the gradient of
// the shift.
struct Partials {
  const Conv3x3WeightGradient& plan;
  int64_t kernel, shortcut, shift;  // entries of a gradient

  explicit Partials(const Conv3x3WeightGradient& plan_)
      : plan(plan_),
        kernel(9 * plan_.x.total * plan_.features),
        shortcut(plan_.projected.total * plan_.features),
        shift(plan_.batch * plan_.features) {}

  static bool direct(const Result& to, int64_t splits) {
    return splits == 1 && to.type == Type::kFloat32;
  }
  // Entries in the workspace.
  int64_t of_kernel(const Splits& splits) const {
    return direct(plan.dkernel, splits.kernel) ? 0 : splits.kernel * kernel;
  }
  int64_t of_shortcut(const Splits& splits) const {
    return direct(plan.dshortcut, splits.shortcut) ? 0 : splits.shortcut * shortcut;
  }
  bool fit(const Splits& splits, int64_t slots) const {
    return of_kernel(splits) + of_shortcut(splits) + slots * shift <= plan.workspace_floats;
  }
  float* kernel_at(const Splits& splits) const {
    return of_kernel(splits) ? plan.workspace : static_cast<float*>(plan.dkernel.data);
  }
  float* shortcut_at(const Splits& splits) const {
    return of_shortcut(splits) ? plan.workspace + of_kernel(splits)
                               : static_cast<float*>(plan.dshortcut.data);
  }
  float* shift_at(const Splits& splits) const {
    return plan.workspace + of_kernel(splits) + of_shortcut(splits);
  }

  cudaError_t reduce(const Splits& splits, bool accumulator_tiles, int64_t slots,
                     cudaStream_t stream) const {
    const int64_t rows =
        plan.shifts == 1 ? plan.batch : 1;  // a shift of all samples has the parts of all samples
    // The shift first: its many parts of few entries take longest.
    return split_k_reduce(
        {{shift_at(splits), plan.dshift, static_cast<int>(slots * rows), shift / rows},
         norm_parameter(0, plan.of_offset),
         norm_parameter(1, plan.of_scale),
         {shortcut_at(splits), plan.dshortcut, static_cast<int>(splits.shortcut),
          of_shortcut(splits) ? shortcut : 0},
         {kernel_at(splits), plan.dkernel, static_cast<int>(splits.kernel),
          of_kernel(splits) ? kernel : 0, accumulator_tiles ? static_cast<int>(plan.features) : 0}},
        stream);
  }

  // Without pixels or features: all gradients are zeros but those of the norm.
  cudaError_t reduce_nothing(cudaStream_t stream) const {
    return split_k_reduce({{nullptr, plan.dshift, 0, plan.shifts * plan.features},
                           norm_parameter(0, plan.of_offset),
                           norm_parameter(1, plan.of_scale),
                           {nullptr, plan.dshortcut, 0, shortcut},
                           {nullptr, plan.dkernel, 0, kernel}},
                          stream);
  }

 private:
  // Adds a sum of the norm's gradient over the samples; each sample has both sums of every channel,
  // 0 of the offset and 1 of the scale.
  SplitKReduction norm_parameter(int which, float* to) const {
    if (!plan.norm) return {};
    const int64_t channels = plan.x.total;
    return {plan.norm_sums + which * channels,
            {to, Type::kFloat32},
            static_cast<int>(2 * plan.batch),
            channels,
            0,
            2};
  }
};

int64_t strips_of(const WeightGradientCut& cut, int64_t batch) {
  return ceil_div(batch, cut.samples) * cut.strips_of_sample;
}

SplitK split_k_of(const WeightGradientCut& cut, int64_t batch, int64_t splits) {
  return {static_cast<int>(strips_of(cut, batch)), static_cast<int>(cut.strips_of_sample),
          static_cast<int>(splits)};
}

// Estimated times of the Hopper weight gradient, in microseconds on an H200. To refit: time the
// weight gradients of a training step with the numbers of splits forced around the chosen ones, and
// solve for the three by least squares.
constexpr double kStripTime = 0.7;    // to multiply a strip of 64 pixels
constexpr double kBlockTime = 5;      // to start a block and to store its partial results
constexpr double kReduceTime = 0.03;  // to reduce the partial results of a block

// A choice of the tiles and of the number of splits.
struct Choice {
  WeightGradientCut cut;
  Splits splits;
  double microseconds = 0;  // estimated
};

// The splits with the least estimated time. The shortcut's blocks get so many strips that they take
// as long as the others, unless there are no others.
Choice hopper_splits(const WeightGradientCut& cut, const Partials& partials, int multiprocessors) {
  const int64_t strips = strips_of(cut, partials.plan.batch);
  const bool alone = cut.tiles == 0;
  const auto both = [&](int64_t splits) {
    if (alone) return Splits{1, splits};
    const double shortcut = static_cast<double>(splits) * cut.shortcut_time;
    return Splits{splits, std::clamp<int64_t>(static_cast<int64_t>(shortcut + 0.5), 1, strips)};
  };
  const auto microseconds = [&](const Splits& splits) {
    const int64_t blocks = cut.tiles * splits.kernel + cut.shortcut_tiles * splits.shortcut;
    const int64_t waves = ceil_div(blocks, multiprocessors);
    const double strips_of_block =
        alone ? static_cast<double>(ceil_div(strips, splits.shortcut)) * cut.shortcut_time
              : static_cast<double>(ceil_div(strips, splits.kernel));
    const double reduced = splits.kernel * splits.shortcut > 1 ? static_cast<double>(blocks) : 0.0;
    return static_cast<double>(waves) * (kStripTime * strips_of_block + kBlockTime) +
           kReduceTime * reduced * (alone ? cut.shortcut_size : 1.0);
  };
  Choice best{cut, both(1), microseconds(both(1))};
  for (int64_t n = 2; n <= std::min(strips, int64_t{multiprocessors}); ++n) {
    const Choice choice{cut, both(n), microseconds(both(n))};
    if (choice.microseconds < best.microseconds &&
        partials.fit(choice.splits, split_k_of(cut, partials.plan.batch, n).slots())) {
      best = choice;
    }
  }
  return best;
}

// A linear layer of few pixels is faster with tiles of fewer chunks, which need fewer splits to
// occupy the device.
Choice hopper_choice(const Partials& partials, int multiprocessors) {
  const WeightGradientCut cut = hopper_weight_gradient_cut(partials.plan);
  Choice best = hopper_splits(cut, partials, multiprocessors);
  for (int chunks = cut.block_chunks - 1; cut.tiles == 0 && chunks > 0; --chunks) {
    const WeightGradientCut smaller = hopper_weight_gradient_cut(partials.plan, chunks);
    if (smaller.block_chunks < chunks) continue;  // it comes later
    const Choice choice = hopper_splits(smaller, partials, multiprocessors);
    if (choice.microseconds < best.microseconds) best = choice;
  }
  return best;
}

// Two blocks for each multiprocessor, if the workspace has room.
Choice few_choice(const Partials& partials, int multiprocessors) {
  const WeightGradientCut cut = few_weight_gradient_cut(partials.plan);
  const int64_t strips = strips_of(cut, partials.plan.batch);
  int64_t splits = std::clamp<int64_t>(2 * multiprocessors / cut.tiles, 1, strips);
  while (splits > 1 &&
         !partials.fit({splits, 1}, split_k_of(cut, partials.plan.batch, splits).slots()))
    --splits;
  return {cut, {splits, 1}};
}

// Four blocks for each multiprocessor, if the workspace has room, and at least 256 pixels for each;
// likewise two for the sums of dy, which are a separate kernel.
cudaError_t implicit_gemm(const Partials& partials, int multiprocessors, cudaStream_t stream) {
  const Conv3x3WeightGradient& plan = partials.plan;
  const int64_t image = plan.height * plan.width, blocks = plan.batch * ceil_div(plan.features, 64);
  int64_t segments = std::clamp<int64_t>(2 * multiprocessors / blocks, 1, ceil_div(image, 256));
  if (!partials.fit({1, 1}, segments)) segments = 1;
  const int64_t tiles =
      ceil_div(9 * plan.x.total + plan.projected.total, 64) * ceil_div(plan.features, 64);
  int64_t most =
      std::clamp<int64_t>(4 * multiprocessors / tiles, 1, ceil_div(plan.batch * image, 256));
  while (most > 1 && !partials.fit({most, most}, segments)) --most;
  const Splits splits{most, most};
  cudaError_t error =
      channel_sums(plan, static_cast<int>(segments), partials.shift_at(splits), stream);
  if (error == cudaSuccess) {
    error = implicit_gemm_weight_gradient(plan, static_cast<int>(most), partials.kernel_at(splits),
                                          partials.shortcut_at(splits), stream);
  }
  return error == cudaSuccess ? partials.reduce(splits, false, segments, stream) : error;
}

}  // namespace

cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream) {
  Device device;
  cudaError_t error = describe(&device);
  if (error != cudaSuccess) return error;
  const Partials partials(plan);
  if (plan.batch * plan.height * plan.width == 0 || plan.features == 0)
    return partials.reduce_nothing(stream);
  const Kernel kernel = weight_gradient_kernel(plan, device.hopper);
  if (kernel == Kernel::kImplicitGemm)
    return implicit_gemm(partials, device.multiprocessors, stream);
  const bool hopper = kernel == Kernel::kHopper;
  const Choice choice = hopper ? hopper_choice(partials, device.multiprocessors)
                               : few_choice(partials, device.multiprocessors);
  const WeightGradientCut& cut = choice.cut;
  const Splits& splits = choice.splits;
  const SplitK split_k = split_k_of(cut, plan.batch, splits.kernel),
               shortcut_split_k = split_k_of(cut, plan.batch, splits.shortcut);
  const ShiftPartials shift{partials.shift_at(splits),
                            (cut.tiles > 0 ? split_k : shortcut_split_k).slots(),
                            static_cast<int>(plan.batch), static_cast<int>(plan.features)};
  const bool accumulator_tiles =
      cut.whole_tiles && partials.of_kernel(splits) > 0;  // only the reduction reads them
  error = hopper ? hopper_weight_gradient(plan, cut, split_k, partials.kernel_at(splits),
                                          accumulator_tiles, shift, shortcut_split_k,
                                          partials.shortcut_at(splits), stream)
                 : few_weight_gradient(plan, split_k, partials.kernel_at(splits), shift, stream);
  return error == cudaSuccess ? partials.reduce(splits, accumulator_tiles, shift.slots, stream)
                              : error;
}

}  // namespace jaxunet::cuda
