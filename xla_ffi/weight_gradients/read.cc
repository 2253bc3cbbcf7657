// Reads and checks calls of several weight gradients: the operands and results of the members' own
// calls one after the other, except for their workspaces, then the sums and the gradients of each
// further norm, and one workspace for all members. Shared by the CPU and the CUDA build.
#include "conv3x3/read.h"

#include "group_norm/plan.h"
#include "linear/plan.h"
#include "weight_gradients/plan.h"

namespace jaxunet {
namespace {

// `name`: of the sums, for messages.
NormSums read_norm(Reader& call, const std::string& name) {
  const Array sums = call.operand(name, ffi::DataType::F32, {kAny, 2, kAny});
  NormSums norm{static_cast<const float*>(sums.data), sums.dims[0], sums.dims[2], nullptr, nullptr};
  call.at_most(name, "samples", norm.batch, kMaxSamples);
  const auto row = [&](const char* gradient) {
    const Dims shape{1, norm.channels};
    return static_cast<float*>(call.result(gradient, ffi::DataType::F32, shape).data);
  };
  norm.of_scale = row("of_scale");
  norm.of_offset = row("of_offset");
  return norm;
}

}  // namespace

WeightGradients read_weight_gradients(Reader& call) {
  WeightGradients plan{};
  const int64_t count = call.integer("members", 1);
  int64_t minimum = 0;
  for (int64_t i = 0; i < count; ++i) {
    call.member(i);
    plan.members.push_back(call.flag("linear") ? read_linear_weight_gradient_member(call)
                                               : read_conv3x3_weight_gradient_member(call));
    if (plan.members[i].type != plan.members[0].type)
      call.fail("expected the type of member 0, found another");
    minimum += minimum_workspace(plan.members[i]);
  }
  call.shared();
  const int64_t norms = call.integer("norms", 0);
  for (int64_t i = 0; i < norms; ++i)
    plan.norms.push_back(read_norm(call, "norm_sums[" + std::to_string(i) + "]"));
  read_workspace(call, plan, minimum);
  return plan;
}

}  // namespace jaxunet
