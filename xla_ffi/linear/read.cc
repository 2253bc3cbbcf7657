// Reads and checks the linear layer's calls: operands, results and attributes in the order in which
// vjp.py passes them. Shared by the CPU and the CUDA build.
#include "conv3x3/read.h"

#include "linear/plan.h"

namespace jaxunet {
namespace {

template <class Plan>
Array read_x(Reader& call, Plan& plan) {
  const Array x = read_projected(call, "x", plan);
  if (plan.projected.total == 0) call.fail("x: no channels");
  return x;
}

}  // namespace

Conv3x3 read_linear(Reader& call) {
  Conv3x3 plan{};
  const Array x = read_x(call, plan);
  const Array kernel = call.operand("kernel", x.element, {plan.projected.total, kAny});
  plan.shortcut = kernel.data;
  plan.features = kernel.dims[1];
  plan.shift = call.rows("bias", 1, plan.features);
  const Dims image{plan.batch, plan.height, plan.width, plan.features};
  if (call.flag("residual")) {
    plan.residual = {
        1, {call.operand("residual", x.element, image).data}, {plan.features}, plan.features};
  }
  plan.y = {1, {call.result("y", x.element, image).data}, {plan.features}, plan.features};
  regroup(plan, kRegroupedRows);
  return plan;
}

Conv3x3WeightGradient read_linear_weight_gradient_member(Reader& call) {
  Conv3x3WeightGradient plan{};
  const Array x = read_x(call, plan);
  const Array dy = call.operand("dy", x.element, {plan.batch, plan.height, plan.width, kAny});
  plan.dy = dy.data;
  plan.features = dy.dims[3];
  plan.dshortcut = read_gradient(call, "dkernel", x.element, {plan.projected.total, plan.features});
  plan.dshift = read_gradient(call, "dbias", x.element, {1, plan.features}, &plan.shifts);
  // One sample, because dbias is the sum over all samples.
  regroup(plan, pixels(plan) / kRegroupedColumns);
  return plan;
}

Conv3x3WeightGradient read_linear_weight_gradient(Reader& call) {
  Conv3x3WeightGradient plan = read_linear_weight_gradient_member(call);
  read_workspace(call, plan, minimum_workspace(plan));
  return plan;
}

}  // namespace jaxunet
