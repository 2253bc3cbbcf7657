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
  first.dims[3] = plan.x.total;
  return first;
}

void read_groups(Reader& call, int64_t channels, int64_t* groups) {
  *groups = call.integer("groups", 1);
  if (channels % *groups != 0) {
    call.fail(std::to_string(channels) + " channels are not a multiple of " + std::to_string(*groups) + " groups");
  }
}

template <class Plan>
Array read_input(Reader& call, Plan& plan) {
  const Array x = read_image(call, plan);
  read_groups(call, plan.x.total, &plan.groups);
  plan.eps = call.number("eps");
  plan.scale = call.rows("scale", plan.batch, plan.x.total);
  plan.offset = call.rows("offset", plan.batch, plan.x.total);
  return x;
}

float* per_channel(Reader& call, const char* name, int64_t batch, int64_t channels) {
  return static_cast<float*>(call.result(name, ffi::DataType::F32, {batch, channels}).data);
}

// The normalisation as a · x + b.
template <class Plan>
void read_results(Reader& call, Plan& plan, int64_t channels) {
  plan.a = per_channel(call, "a", plan.batch, channels);
  plan.b = per_channel(call, "b", plan.batch, channels);
  plan.mean = per_channel(call, "mean", plan.batch, channels);
  plan.inverse = per_channel(call, "inverse", plan.batch, channels);
}

}  // namespace

NormForward read_norm_forward(Reader& call) {
  NormForward plan{};
  const Array x = read_input(call, plan);
  plan.silu = call.flag("silu");
  plan.y = call.result("y", x.element, x.dims).data;
  plan.mean = per_channel(call, "mean", plan.batch, plan.x.total);
  plan.inverse = per_channel(call, "inverse", plan.batch, plan.x.total);
  return plan;
}

NormStatistics read_norm_statistics(Reader& call) {
  NormStatistics plan{};
  read_input(call, plan);
  read_results(call, plan, plan.x.total);
  return plan;
}

NormCombine read_norm_combine(Reader& call) {
  NormCombine plan{};
  plan.height = call.integer("height", 0);
  plan.width = call.integer("width", 0);
  Parts& all = plan.moments;
  all.count = static_cast<int>(call.integer("parts", 1, kMaxParts));
  const int64_t tiles = moment_tiles(plan.height, plan.width);
  for (int i = 0; i < all.count; ++i) {
    const std::string name = "moments[" + std::to_string(i) + "]";
    const Array part = call.operand(name, ffi::DataType::F32, {i ? plan.batch : kAny, kAny, kAny, 2});
    plan.batch = part.dims[0];
    plan.tiles[i] = part.dims[1];
    if (plan.tiles[i] != tiles && plan.tiles[i] != 1) {
      call.fail(name + ": expected 1 tile or " + std::to_string(tiles) + " tiles of 8 x 8 pixels, found " +
                std::to_string(plan.tiles[i]));
    }
    all.data[i] = part.data;
    all.total += all.channels[i] = part.dims[2];
  }
  read_groups(call, all.total, &plan.groups);
  plan.eps = call.number("eps");
  plan.scale = call.rows("scale", plan.batch, all.total);
  plan.offset = call.rows("offset", plan.batch, all.total);
  read_results(call, plan, all.total);
  return plan;
}

NormApply read_norm_apply(Reader& call) {
  NormApply plan{};
  const Array x = read_image(call, plan);
  plan.silu = call.flag("silu");
  plan.a = call.rows("a", plan.batch, plan.x.total);
  plan.b = call.rows("b", plan.batch, plan.x.total);
  plan.y = call.result("y", x.element, x.dims).data;
  return plan;
}

NormGradient read_norm_gradient(Reader& call) {
  NormGradient plan{};
  const Array x = read_image(call, plan);
  plan.silu = call.flag("silu");
  read_groups(call, plan.x.total, &plan.groups);
  plan.dy = call.operand("dy", x.element, x.dims).data;
  plan.scale = call.rows("scale", plan.batch, plan.x.total);
  plan.offset = call.rows("offset", plan.batch, plan.x.total);
  plan.mean = call.rows("mean", plan.batch, plan.x.total);
  plan.inverse = call.rows("inverse", plan.batch, plan.x.total);
  plan.sums = static_cast<float*>(call.result("sums", ffi::DataType::F32, {plan.batch, 2, plan.x.total}).data);
  const auto gradient_of = [&](const char* name, const Rows& rows) {
    const Dims dims{rows.stride > 0 ? plan.batch : 1, plan.x.total};
    return static_cast<float*>(call.result(name, ffi::DataType::F32, dims).data);
  };
  plan.of_scale = gradient_of("of_scale", plan.scale);
  plan.of_offset = gradient_of("of_offset", plan.offset);
  plan.dx = plan.x;
  for (int i = 0; i < plan.x.count; ++i) {
    Dims part = x.dims;
    part[3] = plan.x.channels[i];
    plan.dx.data[i] = call.result("dx[" + std::to_string(i) + "]", x.element, part).data;
  }
  if (call.flag("activation")) plan.active = call.result("active", x.element, x.dims).data;
  return plan;
}

}  // namespace jaxunet
