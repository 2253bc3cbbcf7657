// The partial results of a weight gradient: where they go, and the reductions that add them and a
// norm's sums.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/integers.h"
#include "conv3x3/kernels.h"
#include "conv3x3/split_k.h"

namespace jaxunet::cuda {

// The number of splits of the kernel's gradient, and of the shortcut's.
struct Splits {
  int64_t kernel, shortcut;
};

// The reductions over the samples of a norm's two sums, for the gradients of offset and scale. In
// (batch, 2, channels) the parts of each are every second one.
inline std::array<SplitKReduction, 2> norm_reductions(const NormSums& norm) {
  const auto reduction = [&](int which, float* to) {
    SplitKReduction sum;
    if (norm.channels == 0) return sum;
    sum.from = norm.sums + which * norm.channels;
    sum.to = {to, Type::kFloat32};
    sum.parts = static_cast<int>(2 * norm.batch);
    sum.count = norm.channels;
    sum.part_stride = 2;
    return sum;
  };
  return {reduction(0, norm.of_offset), reduction(1, norm.of_scale)};
}

// Where the partial results go. A gradient that is not split is written in place, if it is float32
// or the kernel narrows it. All others are in the workspace, in this order: the kernel's gradient,
// the shortcut's gradient, and the sums of dy, which are the gradient of the shift. All sizes count
// floats.
struct Partials {
  const Conv3x3WeightGradient& plan;
  bool narrows;                     // the kernel can write gradients of the type of x
  int64_t kernel, shortcut, shift;  // per split (shift: per slot)

  explicit Partials(const Conv3x3WeightGradient& plan_, bool narrows_ = false)
      : plan(plan_),
        narrows(narrows_),
        kernel(9 * plan_.x.total * plan_.features),
        shortcut(plan_.projected.total * plan_.features),
        shift(plan_.batch * plan_.features) {}

  // True if the kernel writes the gradient itself, which needs no reduction.
  bool direct(const Result& gradient, int64_t splits) const {
    return splits == 1 && (narrows || gradient.type == Type::kFloat32);
  }
  // Size of the partial results in the workspace; 0 if they are the gradient itself.
  int64_t kernel_floats(const Splits& splits) const {
    return direct(plan.dkernel, splits.kernel) ? 0 : splits.kernel * kernel;
  }
  int64_t shortcut_floats(const Splits& splits) const {
    return direct(plan.dshortcut, splits.shortcut) ? 0 : splits.shortcut * shortcut;
  }
  int64_t floats(const Splits& splits, int64_t slots) const {
    return kernel_floats(splits) + shortcut_floats(splits) + slots * shift;
  }
  bool fit(const Splits& splits, int64_t slots) const {
    return floats(splits, slots) <= plan.workspace_floats;
  }
  Result kernel_at(const Splits& splits) const {
    return kernel_floats(splits) ? Result{plan.workspace, Type::kFloat32} : plan.dkernel;
  }
  Result shortcut_at(const Splits& splits) const {
    return shortcut_floats(splits) ? Result{plan.workspace + kernel_floats(splits), Type::kFloat32}
                                   : plan.dshortcut;
  }
  // The address of partial results as floats; it is not read if there are none.
  static float* floats_at(const Result& partials) { return static_cast<float*>(partials.data); }
  float* shift_at(const Splits& splits) const {
    return plan.workspace + kernel_floats(splits) + shortcut_floats(splits);
  }

  // The reductions that add the partial results of all gradients, and the norm's sums. The first
  // takes longest: the shift has many parts of few entries.
  std::vector<SplitKReduction> reductions(const Splits& splits, bool accumulator_tiles,
                                          int64_t slots) const {
    // If all samples share one shift, its gradient is also summed over the samples: each sample's
    // sum in a slot is then a part to add.
    const int64_t parts_of_slot = plan.shifts == 1 ? plan.batch : 1;
    const auto [offset, scale] = norm_reductions(plan.norm);
    return {{shift_at(splits), plan.dshift, static_cast<int>(slots * parts_of_slot),
             shift / parts_of_slot},
            offset,
            scale,
            {floats_at(shortcut_at(splits)), plan.dshortcut, static_cast<int>(splits.shortcut),
             shortcut_floats(splits) ? shortcut : 0},
            {floats_at(kernel_at(splits)), plan.dkernel, static_cast<int>(splits.kernel),
             kernel_floats(splits) ? kernel : 0,
             accumulator_tiles ? static_cast<int>(plan.features) : 0}};
  }

  // Without pixels or features, all gradients except the norm's are zeros.
  std::vector<SplitKReduction> reductions_of_nothing() const {
    const auto [offset, scale] = norm_reductions(plan.norm);
    return {{nullptr, plan.dshift, 0, plan.shifts * plan.features},
            offset,
            scale,
            {nullptr, plan.dshortcut, 0, shortcut},
            {nullptr, plan.dkernel, 0, kernel}};
  }
};

// Number of strips in the batch.
inline int64_t strips_of(const WeightGradientTiling& tiling, int64_t batch) {
  return ceil_div(batch, tiling.samples) * tiling.strips_of_sample;
}

inline SplitK split_k_of(const WeightGradientTiling& tiling, int64_t batch, int64_t splits) {
  return {static_cast<int>(strips_of(tiling, batch)), static_cast<int>(tiling.strips_of_sample),
          static_cast<int>(splits)};
}

}  // namespace jaxunet::cuda
