// Reads and checks the calls of the GroupNorm handlers: operands, results and attributes in the
// order in which vjp.py passes them. Shared by the CPU and the CUDA build.
#include "binding/reader.h"
#include "plan.h"

namespace jaxunet {
namespace {

// Reads the parts of x, whose shapes give type, batch and pixels. Returns x as one array of all
// channels.
template <class Plan>
Array read_image(Reader& call, Plan& plan) {
  Array first;
  plan.x = call.parts("x", call.integer("parts", 1, kMaxParts), &first);
  plan.type = kind(first.element);
  plan.batch = first.dims[0];
  plan.pixels = first.dims[1] * first.dims[2];
  if (plan.pixels == 0) call.fail("x: no pixels");
  call.at_most("x", "samples", plan.batch, kMaxSamples);
  call.at_most("x", "pixels of a sample", plan.pixels, kMaxPixels);
  first.dims[3] = plan.x.total;
  return first;
}

template <class Plan>
void read_groups(Reader& call, Plan& plan) {
  plan.groups = call.integer("groups", 1);
  if (plan.x.total % plan.groups != 0) {
    call.fail(std::to_string(plan.x.total) + " channels are not a multiple of " +
              std::to_string(plan.groups) + " groups");
  }
}

// Reads the first operands of norm_forward and norm_statistics: x, groups, eps, scale, offset.
template <class Plan>
Array read_input(Reader& call, Plan& plan) {
  const Array x = read_image(call, plan);
  read_groups(call, plan);
  plan.eps = call.number("eps");
  plan.scale = call.rows("scale", plan.batch, plan.x.total);
  plan.offset = call.rows("offset", plan.batch, plan.x.total);
  return x;
}

// Reads the next result, a float32 (batch, channels).
float* per_channel(Reader& call, const char* name, const NormInput& plan) {
  return static_cast<float*>(
      call.result(name, ffi::DataType::F32, {plan.batch, plan.x.total}).data);
}

// Reads the last operand, the samples' words. Checks that the kernels implement dropout for the
// call.
template <class Plan>
Dropout read_dropout(Reader& call, const Plan& plan) {
  const int64_t bytes = plan.type == Type::kFloat32 ? 4 : 2;
  if (!plan.silu) call.fail("dropout needs silu = true");
  if (plan.x.count != 1 || plan.x.total * bytes % 16 != 0) {
    call.fail("dropout needs x of one part whose pixels are multiples of 16 bytes, found " +
              std::to_string(plan.x.count) + " parts and pixels of " +
              std::to_string(plan.x.total * bytes) + " bytes");
  }
  Dropout dropout;
  dropout.threshold = static_cast<uint32_t>(call.integer("threshold", 0, (int64_t{1} << 16) - 1));
  dropout.factor = call.number("factor");
  dropout.seeds =
      static_cast<const uint32_t*>(call.operand("seeds", ffi::DataType::U32, {plan.batch, 2}).data);
  return dropout;
}

}  // namespace

NormForward read_norm_forward(Reader& call) {
  NormForward plan{};
  const Array x = read_input(call, plan);
  plan.silu = call.flag("silu");
  plan.y = call.result("y", x.element, x.dims).data;
  plan.mean = per_channel(call, "mean", plan);
  plan.inverse = per_channel(call, "inverse", plan);
  return plan;
}

NormForward read_norm_dropout_forward(Reader& call) {
  NormForward plan = read_norm_forward(call);
  plan.dropout = read_dropout(call, plan);
  return plan;
}

NormStatistics read_norm_statistics(Reader& call) {
  NormStatistics plan{};
  read_input(call, plan);
  plan.a = per_channel(call, "a", plan);
  plan.b = per_channel(call, "b", plan);
  plan.mean = per_channel(call, "mean", plan);
  plan.inverse = per_channel(call, "inverse", plan);
  return plan;
}

NormGradient read_norm_gradient(Reader& call) {
  NormGradient plan{};
  const Array x = read_image(call, plan);
  plan.silu = call.flag("silu");
  plan.rounded = call.flag("rounded");
  read_groups(call, plan);
  plan.dy = call.operand("dy", x.element, x.dims).data;
  plan.scale = call.rows("scale", plan.batch, plan.x.total);
  plan.offset = call.rows("offset", plan.batch, plan.x.total);
  plan.mean = call.rows("mean", plan.batch, plan.x.total);
  plan.inverse = call.rows("inverse", plan.batch, plan.x.total);
  const auto part_dims = [&](int i) {
    Dims part = x.dims;
    part[3] = plan.x.channels[i];
    return part;
  };
  plan.added_count = static_cast<int>(call.integer("added", 0, kMaxAdded));
  for (int k = 0; k < plan.added_count; ++k) {
    plan.added[k] = plan.x;
    for (int i = 0; i < plan.x.count; ++i) {
      const std::string name = "added[" + std::to_string(k) + "][" + std::to_string(i) + "]";
      plan.added[k].data[i] = call.operand(name, x.element, part_dims(i)).data;
    }
  }
  plan.sums = static_cast<float*>(
      call.result("sums", ffi::DataType::F32, {plan.batch, 2, plan.x.total}).data);
  const auto row_gradient = [&](const char* name, const Rows& rows) {
    const Dims dims{rows.stride > 0 ? plan.batch : 1, plan.x.total};
    return static_cast<float*>(call.result(name, ffi::DataType::F32, dims).data);
  };
  plan.parameter_gradients = call.flag("samples");
  if (plan.parameter_gradients) {
    plan.dscale = row_gradient("of_scale", plan.scale);
    plan.doffset = row_gradient("of_offset", plan.offset);
  }
  plan.dx = plan.x;
  for (int i = 0; i < plan.x.count; ++i) {
    plan.dx.data[i] = call.result("dx[" + std::to_string(i) + "]", x.element, part_dims(i)).data;
  }
  if (call.flag("activation")) plan.active = call.result("active", x.element, x.dims).data;
  return plan;
}

NormGradient read_norm_dropout_gradient(Reader& call) {
  NormGradient plan = read_norm_gradient(call);
  if (plan.added_count > 0 || plan.active)
    call.fail("dropout needs added = 0 and activation = false");
  plan.dropout = read_dropout(call, plan);
  return plan;
}

}  // namespace jaxunet
