// Reads and checks the convolution's calls: operands, results and attributes in the order in which
// calls.py, parameter_gradients.py and upsampled.py pass them. Shared by the CPU and the CUDA
// build.
#include "conv3x3/read.h"

#include <utility>

#include "group_norm/plan.h"

namespace jaxunet {
namespace {

// Reads the image to convolve.
template <class Plan>
Array read_image(Reader& call, Plan& plan) {
  Array first;
  plan.x = call.parts("x", call.integer("parts", 1, kMaxParts), &first);
  if (plan.x.total == 0) call.fail("x: no channels");
  plan.type = kind(first.element);
  plan.batch = first.dims[0];
  plan.height = first.dims[1];
  plan.width = first.dims[2];
  call.at_most("x", "pixels", pixels(plan), kMaxPixels);
  return first;
}

// Reads the small image or, if `upsampled`, the large one. The plan gets the size of the small
// image.
template <class Plan>
Array read_image_of_phases(Reader& call, Plan& plan, bool upsampled) {
  const Array x = call.floating("x", 4);
  if (x.dims.size() != 4) call.fail("x: expected 4 dimensions");
  plan.type = kind(x.element);
  plan.batch = x.dims[0];
  plan.height = x.dims[1];
  plan.width = x.dims[2];
  plan.channels = x.dims[3];
  if (plan.channels == 0) call.fail("x: no channels");
  if (upsampled) {
    if (plan.height % 2 || plan.width % 2) call.fail("x: expected an even height and width");
    plan.height /= 2;
    plan.width /= 2;
  }
  call.at_most("x", "pixels", pixels(plan), kMaxPixels / 4);
  return x;
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
  if (call.flag("shift")) plan.shift = call.rows("shift", plan.batch, plan.features);
  const Dims image{plan.batch, plan.height, plan.width, plan.features};
  const Array y = plan.type == Type::kBfloat16
                      ? call.result("y", first.element, ffi::DataType::F32, image)
                      : call.result("y", first.element, image);
  plan.y = {1, {y.data}, {plan.features}, plan.features};
  plan.wide = y.element != first.element;
  const int64_t residuals = call.integer("residuals", 0, kMaxParts);
  const bool projects = call.flag("shortcut");
  plan.residual = call.parts("residual", residuals, projects ? first.element : y.element,
                             {plan.batch, plan.height, plan.width});
  if (projects) {
    if (residuals == 0) call.fail("shortcut: expected a residual for it to project, found none");
    std::swap(plan.projected, plan.residual);
    const Dims matrix = plan.flipped ? Dims{plan.features, plan.projected.total}
                                     : Dims{plan.projected.total, plan.features};
    plan.shortcut = call.operand("shortcut", first.element, matrix).data;
  } else if (residuals > 0 && plan.residual.total != plan.features) {
    call.fail("residual: expected " + std::to_string(plan.features) +
              " channels or a shortcut, found " + std::to_string(plan.residual.total));
  }
  if (call.flag("activation")) {
    plan.a = call.rows("a", plan.batch, plan.x.total);
    plan.b = call.rows("b", plan.batch, plan.x.total);
  }
  return plan;
}

Conv3x3 read_conv3x3_shortcut_gradient(Reader& call) {
  Conv3x3 plan{};
  const Array dy = read_projected(call, "dy", plan);
  plan.flipped = true;
  const Array shortcut = call.operand("shortcut", dy.element, {kAny, plan.projected.total});
  plan.shortcut = shortcut.data;
  plan.features = shortcut.dims[0];
  plan.y = call.result_parts("dresidual", call.integer("residuals", 1, kMaxParts), dy.element,
                             {plan.batch, plan.height, plan.width});
  if (plan.y.total != plan.features) {
    call.fail("dresidual: expected " + std::to_string(plan.features) +
              " channels, the rows of the shortcut, found " + std::to_string(plan.y.total));
  }
  regroup(plan, kRegroupedRows);
  return plan;
}

UpsampledConv3x3 read_conv3x3_upsampled(Reader& call) {
  UpsampledConv3x3 plan{};
  plan.flipped = call.flag("flipped");
  const Array x = read_image_of_phases(call, plan, plan.flipped);
  const Dims shape =
      plan.flipped ? Dims{2, 2, 2, 2, kAny, plan.channels} : Dims{2, 2, 2, 2, plan.channels, kAny};
  const Array kernel = call.operand("kernel", x.element, shape);
  plan.x = x.data;
  plan.kernel = kernel.data;
  plan.features = kernel.dims[plan.flipped ? 4 : 5];
  if (!plan.flipped) plan.shift = call.rows("shift", plan.batch, plan.features);
  const int64_t scale = plan.flipped ? 1 : 2;
  plan.y = call.result("y", x.element,
                       {plan.batch, scale * plan.height, scale * plan.width, plan.features})
               .data;
  return plan;
}

Conv3x3WeightGradient read_conv3x3_weight_gradient_member(Reader& call) {
  Conv3x3WeightGradient plan{};
  const Array first = read_image(call, plan);
  const Array dy = call.operand("dy", first.element, {plan.batch, plan.height, plan.width, kAny});
  plan.dy = dy.data;
  plan.features = dy.dims[3];
  plan.projected = call.parts("residual", call.integer("residuals", 0, kMaxParts), first.element,
                              {plan.batch, plan.height, plan.width});
  const bool norm = call.flag("norm");
  if (norm) {
    const Array sums = call.operand("norm_sums", ffi::DataType::F32, {plan.batch, 2, plan.x.total});
    call.at_most("norm_sums", "samples", plan.batch, kMaxSamples);
    plan.norm.sums = static_cast<const float*>(sums.data);
    plan.norm.batch = plan.batch;
    plan.norm.channels = plan.x.total;
  }
  plan.dkernel = read_gradient(call, "dkernel", first.element, {3, 3, plan.x.total, plan.features});
  read_shift_gradient(call, first.element, plan);
  if (plan.projected.count > 0) {
    plan.dshortcut =
        read_gradient(call, "dshortcut", first.element, {plan.projected.total, plan.features});
  }
  if (norm) {
    const auto row = [&](const char* name) {
      return static_cast<float*>(call.result(name, ffi::DataType::F32, {1, plan.x.total}).data);
    };
    plan.norm.of_scale = row("of_scale");
    plan.norm.of_offset = row("of_offset");
  }
  return plan;
}

Conv3x3WeightGradient read_conv3x3_weight_gradient(Reader& call) {
  Conv3x3WeightGradient plan = read_conv3x3_weight_gradient_member(call);
  read_workspace(call, plan, minimum_workspace(plan));
  return plan;
}

UpsampledWeightGradient read_conv3x3_upsampled_weight_gradient(Reader& call) {
  UpsampledWeightGradient plan{};
  const Array x = read_image_of_phases(call, plan, false);
  const Array dy =
      call.operand("dy", x.element, {plan.batch, 2 * plan.height, 2 * plan.width, kAny});
  plan.x = x.data;
  plan.dy = dy.data;
  plan.features = dy.dims[3];
  plan.dkernel = read_gradient(call, "dkernel", x.element, {3, 3, plan.channels, plan.features});
  read_shift_gradient(call, x.element, plan);
  read_workspace(call, plan, minimum_workspace(plan));
  return plan;
}

}  // namespace jaxunet
