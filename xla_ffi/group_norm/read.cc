#include "../reader.h"
#include "plan.h"

namespace jaxunet {
namespace {

template <class Plan>
Array read_image(Reader& call, Plan& plan) {
  Array first;
  plan.x = call.parts("x", call.integer("parts", 1, kMaxParts), &first);
  plan.type = kind(first.element);
  plan.batch = first.dims[0];
  plan.pixels = first.dims[1] * first.dims[2];
  plan.silu = call.flag("silu");
  first.dims[3] = plan.x.total;
  return first;
}

}  // namespace

Moments read_moments(Reader& call) {
  Array x;
  const Parts parts = call.parts("x", 1, &x);
  auto* out = call.result("moments", ffi::DataType::F32, {x.dims[0], parts.total, 2}).data;
  return {kind(x.element), x.dims[0], x.dims[1] * x.dims[2], parts.total, x.data, static_cast<float*>(out)};
}

NormApply read_norm_apply(Reader& call) {
  NormApply plan{};
  const Array x = read_image(call, plan);
  plan.a = call.rows("a", plan.batch, plan.x.total);
  plan.b = call.rows("b", plan.batch, plan.x.total);
  plan.y = call.result("y", x.element, x.dims).data;
  return plan;
}

NormGradient read_norm_gradient(Reader& call) {
  NormGradient plan{};
  const Array x = read_image(call, plan);
  plan.groups = call.integer("groups", 1);
  if (plan.x.total % plan.groups != 0) {
    call.fail(std::to_string(plan.x.total) + " channels are not a multiple of " + std::to_string(plan.groups) +
              " groups");
  }
  plan.dy = call.operand("dy", x.element, x.dims).data;
  plan.scale = call.rows("scale", plan.batch, plan.x.total);
  plan.offset = call.rows("offset", plan.batch, plan.x.total);
  plan.mean = call.rows("mean", plan.batch, plan.x.total);
  plan.inverse = call.rows("inverse", plan.batch, plan.x.total);
  plan.sums = static_cast<float*>(call.result("sums", ffi::DataType::F32, {plan.batch, 2, plan.x.total}).data);
  plan.dx = plan.x;
  for (int i = 0; i < plan.x.count; ++i) {
    Dims part = x.dims;
    part[3] = plan.x.channels[i];
    plan.dx.data[i] = call.result("dx[" + std::to_string(i) + "]", x.element, part).data;
  }
  return plan;
}

}  // namespace jaxunet
