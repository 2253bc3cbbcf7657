// The weight gradients of several layers: one launch of the Hopper kernel, whose blocks are divided
// among the layers, and one of split_k_reduce. Layers that cannot fill the GPU alone then need few
// splits of K, or none, and share the time in which the last blocks of a launch end. The last
// launch also adds the sums of norms, which would take a launch for each norm.
#include <algorithm>
#include <utility>

#include "common/device.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/splits.h"
#include "conv3x3/kernels.h"
#include "weight_gradients/kernels.h"

namespace jaxunet::cuda {
namespace {

// Estimated time of a gradient's longest blocks, in strips of a kernel's gradient.
double length_of(const HopperWeightGradient& gradient) {
  const auto strips = [](const SplitK& split_k) { return static_cast<double>(split_k.count(0)); };
  const double shortcut = strips(gradient.shortcut_split_k) * gradient.tiling.shortcut_time;
  return gradient.tiling.tiles > 0 ? std::max(strips(gradient.split_k), shortcut) : shortcut;
}

// Runs the gradients that the Hopper kernel takes, and `reductions` besides their own. Their plans
// get their parts of the workspace.
cudaError_t run_hopper(std::vector<Conv3x3WeightGradient>& plans, float* workspace, int64_t floats,
                       std::vector<SplitKReduction> reductions, int multiprocessors,
                       cudaStream_t stream) {
  std::vector<Partials> partials;
  for (const Conv3x3WeightGradient& plan : plans) partials.emplace_back(plan, true);
  const std::vector<Choice> choices = hopper_choices(partials, floats, multiprocessors);
  std::vector<HopperWeightGradient> gradients;
  for (size_t i = 0; i < plans.size(); ++i) {
    plans[i].workspace = workspace;
    plans[i].workspace_floats = floats_of(partials[i], choices[i]);
    workspace += plans[i].workspace_floats;
    gradients.push_back(hopper_gradient(partials[i], choices[i]));
    const auto own = hopper_reductions(partials[i], choices[i]);
    reductions.insert(reductions.end(), own.begin(), own.end());
  }
  // Long blocks first; those that start last should be short.
  std::stable_sort(gradients.begin(), gradients.end(), [](const auto& a, const auto& b) {
    return a.tiling.samples != b.tiling.samples ? a.tiling.samples < b.tiling.samples
                                                : length_of(a) > length_of(b);
  });
  const cudaError_t error = hopper_weight_gradients(gradients, stream);
  return error == cudaSuccess ? split_k_reduce(reductions, stream) : error;
}

}  // namespace

cudaError_t weight_gradients(const WeightGradients& plan, cudaStream_t stream, KernelSet kernels) {
  Device device;
  cudaError_t error = describe(kernels, &device);
  std::vector<Conv3x3WeightGradient> hopper;
  for (size_t i = 0; i < plan.members.size() && error == cudaSuccess; ++i) {
    Conv3x3WeightGradient member = plan.members[i];
    member.workspace = plan.workspace;
    member.workspace_floats = plan.workspace_floats;
    if (weight_gradient_kernel(member, device.hopper) == Kernel::kHopper &&
        member.batch * member.height * member.width > 0 && member.features > 0) {
      hopper.push_back(member);
    } else {
      error = conv3x3_weight_gradient(member, stream, kernels);
    }
  }
  if (error != cudaSuccess) return error;
  std::vector<SplitKReduction> reductions;
  for (const NormSums& norm : plan.norms) {
    const auto own = norm_reductions(norm);
    reductions.insert(reductions.end(), own.begin(), own.end());
  }
  if (hopper.empty()) return split_k_reduce(reductions, stream);
  return run_hopper(hopper, plan.workspace, plan.workspace_floats, std::move(reductions),
                    device.multiprocessors, stream);
}

}  // namespace jaxunet::cuda
