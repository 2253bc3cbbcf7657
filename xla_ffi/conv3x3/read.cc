#include <utility>

#include "binding/reader.h"
#include "conv3x3/plan.h"

namespace jaxunet {
namespace {

// The image that is convolved: its parts and what they have in common.
template <class Plan>
Array read_image(Reader& call, Plan& plan) {
  Array first;
  plan.x = call.parts("x", call.integer("parts", 1, kMaxParts), &first);
  if (plan.x.total == 0) call.fail("x: no channels");
  plan.type = kind(first.element);
  plan.batch = first.dims[0];
  plan.height = first.dims[1];
  plan.width = first.dims[2];
  return first;
}

template <class Plan>
void read_activation(Reader& call, Plan& plan) {
  if (!call.flag("activation")) return;
  plan.a = call.rows("a", plan.batch, plan.x.total);
  plan.b = call.rows("b", plan.batch, plan.x.total);
}

// The gradient of a parameter: float32 or the type of x.
Result read_gradient(Reader& call, const char* name, ffi::DataType element, const Dims& shape,
                     int64_t* rows = nullptr) {
  const Array found = call.result(name, element, ffi::DataType::F32, shape);
  if (rows) *rows = found.dims[0];
  return {found.data, kind(found.element)};
}

void read_workspace(Reader& call, Conv3x3WeightGradient& plan) {
  const Array workspace = call.result("workspace", ffi::DataType::F32, {kAny});
  plan.workspace = static_cast<float*>(workspace.data);
  plan.workspace_floats = workspace.dims[0];
  if (plan.workspace_floats < minimum_workspace(plan)) {
    call.fail("workspace: expected at least " + std::to_string(minimum_workspace(plan)) + " numbers, found " +
              std::to_string(plan.workspace_floats));
  }
}

// The image that a linear layer reads.
template <class Plan>
Array read_pixels(Reader& call, Plan& plan) {
  Array x;
  plan.projected = call.parts("x", 1, &x);
  if (plan.projected.total == 0) call.fail("x: no channels");
  plan.type = kind(x.element);
  plan.batch = x.dims[0];
  plan.height = x.dims[1];
  plan.width = x.dims[2];
  return x;
}

template <class Plan>
int64_t pixels(const Plan& plan) {
  return plan.batch * plan.height * plan.width;
}

// A layer without taps takes its pixels in any order. In images as narrow as a strip and as tall as the tallest, the
// kernels of Hopper read no neighbours beside those that they multiply, and small images fill whole strips.
constexpr int64_t kRegroupedColumns = 8, kRegroupedRows = 16;

template <class Plan>
void regroup(Plan& plan, int64_t rows) {
  const int64_t all = pixels(plan);
  if (all == 0 || all % kRegroupedColumns) return;
  plan.width = kRegroupedColumns;
  plan.height = all % (rows * kRegroupedColumns) ? all / kRegroupedColumns : rows;
  plan.batch = all / (plan.height * plan.width);
}

}  // namespace

Conv3x3 read_conv3x3(Reader& call) {
  Conv3x3 plan{};
  const Array first = read_image(call, plan);
  plan.flipped = call.flag("flipped");
  const Dims shape = plan.flipped ? Dims{3, 3, kAny, plan.x.total} : Dims{3, 3, plan.x.total, kAny};
  const Array kernel = call.operand("kernel", first.element, shape);
  plan.kernel = kernel.data;
  plan.features = kernel.dims[plan.flipped ? 2 : 3];
  plan.shift = call.rows("shift", plan.batch, plan.features);
  const int64_t residuals = call.integer("residuals", 0, kMaxParts);
  plan.residual = call.parts("residual", residuals, first.element, {plan.batch, plan.height, plan.width});
  if (call.flag("shortcut")) {
    if (residuals == 0) call.fail("shortcut: expected a residual for it to project, found none");
    std::swap(plan.projected, plan.residual);
    const Dims matrix =
        plan.flipped ? Dims{plan.features, plan.projected.total} : Dims{plan.projected.total, plan.features};
    plan.shortcut = call.operand("shortcut", first.element, matrix).data;
  } else if (residuals > 0 && plan.residual.total != plan.features) {
    call.fail("residual: expected " + std::to_string(plan.features) + " channels or a shortcut, found " +
              std::to_string(plan.residual.total));
  }
  read_activation(call, plan);
  void* y = call.result("y", first.element, {plan.batch, plan.height, plan.width, plan.features}).data;
  plan.y = {1, {y}, {plan.features}, plan.features};
  return plan;
}

Conv3x3 read_conv3x3_shortcut_gradient(Reader& call) {
  Conv3x3 plan{};
  Array dy;
  plan.projected = call.parts("dy", 1, &dy);
  plan.type = kind(dy.element);
  plan.batch = dy.dims[0];
  plan.height = dy.dims[1];
  plan.width = dy.dims[2];
  plan.flipped = true;
  const Array shortcut = call.operand("shortcut", dy.element, {kAny, plan.projected.total});
  plan.shortcut = shortcut.data;
  plan.features = shortcut.dims[0];
  plan.y = call.result_parts("dresidual", call.integer("residuals", 1, kMaxParts), dy.element,
                             {plan.batch, plan.height, plan.width});
  if (plan.y.total != plan.features) {
    call.fail("dresidual: expected " + std::to_string(plan.features) + " channels, the rows of the shortcut, found " +
              std::to_string(plan.y.total));
  }
  regroup(plan, kRegroupedRows);
  return plan;
}

Conv3x3WeightGradient read_conv3x3_weight_gradient(Reader& call) {
  Conv3x3WeightGradient plan{};
  const Array first = read_image(call, plan);
  const Array dy = call.operand("dy", first.element, {plan.batch, plan.height, plan.width, kAny});
  plan.dy = dy.data;
  plan.features = dy.dims[3];
  read_activation(call, plan);
  plan.projected = call.parts("residual", call.integer("residuals", 0, kMaxParts), first.element,
                              {plan.batch, plan.height, plan.width});
  plan.norm = call.flag("norm");
  if (plan.norm) {
    const Array sums = call.operand("norm_sums", ffi::DataType::F32, {plan.batch, 2, plan.x.total});
    plan.norm_sums = static_cast<const float*>(sums.data);
  }
  plan.dkernel = read_gradient(call, "dkernel", first.element, {3, 3, plan.x.total, plan.features});
  plan.dshift = read_gradient(call, "dshift", first.element, {kAny, plan.features}, &plan.shifts);
  if (plan.shifts != 1 && plan.shifts != plan.batch) {
    call.fail("dshift: expected 1 or " + std::to_string(plan.batch) + " rows, found " + std::to_string(plan.shifts));
  }
  if (plan.projected.count > 0) {
    plan.dshortcut = read_gradient(call, "dshortcut", first.element, {plan.projected.total, plan.features});
  }
  if (plan.norm) {
    const auto row = [&](const char* name) {
      return static_cast<float*>(call.result(name, ffi::DataType::F32, {1, plan.x.total}).data);
    };
    plan.of_scale = row("of_scale");
    plan.of_offset = row("of_offset");
  }
  read_workspace(call, plan);
  return plan;
}

Conv3x3 read_linear(Reader& call) {
  Conv3x3 plan{};
  const Array x = read_pixels(call, plan);
  const Array kernel = call.operand("kernel", x.element, {plan.projected.total, kAny});
  plan.shortcut = kernel.data;
  plan.features = kernel.dims[1];
  plan.shift = call.rows("bias", 1, plan.features);
  const Dims image{plan.batch, plan.height, plan.width, plan.features};
  if (call.flag("residual")) {
    plan.residual = {1, {call.operand("residual", x.element, image).data}, {plan.features}, plan.features};
  }
  plan.y = {1, {call.result("y", x.element, image).data}, {plan.features}, plan.features};
  regroup(plan, kRegroupedRows);
  return plan;
}

Conv3x3WeightGradient read_linear_weight_gradient(Reader& call) {
  Conv3x3WeightGradient plan{};
  const Array x = read_pixels(call, plan);
  const Array dy = call.operand("dy", x.element, {plan.batch, plan.height, plan.width, kAny});
  plan.dy = dy.data;
  plan.features = dy.dims[3];
  plan.dshortcut = read_gradient(call, "dkernel", x.element, {plan.projected.total, plan.features});
  plan.dshift = read_gradient(call, "dbias", x.element, {1, plan.features}, &plan.shifts);
  regroup(plan, pixels(plan) / kRegroupedColumns);  // one sample, as the bias is summed over all
  read_workspace(call, plan);
  return plan;
}

}  // namespace jaxunet
