// Reads and checks the calls of projections: operands, results and attributes in the order in which
// vjp.py passes them. Shared by the CPU and the CUDA build.
#include "binding/reader.h"
#include "projections/plan.h"

namespace jaxunet {
namespace {

constexpr int64_t kMaxLayers = 1 << 12;
// Most elements of an array: the kernels count them as int.
constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max() - 4096;

// Reads x, whose type is that of the plan, and checks the number of layers.
template <class Plan>
Array read_x(Reader& call, Plan& plan, int64_t* count) {
  *count = call.integer("layers", 1, kMaxLayers);
  const Array x = call.floating("x", 2);
  if (x.dims.size() != 2 || x.dims[1] == 0)
    call.fail("x: expected [batch, width], width at least 1");
  plan.type = kind(x.element);
  plan.x = x.data;
  plan.batch = x.dims[0];
  plan.width = x.dims[1];
  call.at_most("x", "elements", plan.batch * plan.width, kMaxElements);
  return x;
}

// Reads the kernel of a layer and sets its features.
template <class Plan, class Layer>
void read_kernel(Reader& call, const Plan& plan, const Array& x, Layer& layer) {
  const Array kernel = call.operand("kernel", x.element, {plan.width, kAny});
  layer.kernel = kernel.data;
  layer.features = kernel.dims[1];
  if (layer.features == 0) call.fail("kernel: expected at least one feature, found none");
  call.at_most("kernel", "elements", plan.width * layer.features, kMaxElements);
  call.at_most("y", "elements", plan.batch * layer.features, kMaxElements);
}

}  // namespace

Projections read_projections(Reader& call) {
  Projections plan{};
  int64_t count = 0;
  const Array x = read_x(call, plan, &count);
  for (int64_t i = 0; i < count; ++i) {
    call.member(i);
    Projection layer{};
    const bool product = call.flag("kernel");
    if (product) read_kernel(call, plan, x, layer);
    const int64_t biases = call.integer("biases", 1, kMaxBiases);
    for (int64_t j = 0; j < biases; ++j) {
      const Dims expected{product || j > 0 ? layer.features : kAny};
      const Array bias = call.operand("bias", ffi::DataType::F32, expected);
      layer.features = bias.dims[0];
      layer.biases[j] = static_cast<const float*>(bias.data);
    }
    const Dims rows{product ? plan.batch : 1, layer.features};
    layer.y = static_cast<float*>(call.result("y", ffi::DataType::F32, rows).data);
    plan.layers.push_back(layer);
  }
  call.shared();
  return plan;
}

ProjectionGradients read_projection_gradients(Reader& call) {
  ProjectionGradients plan{};
  int64_t count = 0;
  const Array x = read_x(call, plan, &count);
  for (int64_t i = 0; i < count; ++i) {
    call.member(i);
    ProjectionGradient layer{};
    read_kernel(call, plan, x, layer);
    const Dims rows{plan.batch, layer.features}, matrix{plan.width, layer.features};
    layer.dy = static_cast<const float*>(call.operand("dy", ffi::DataType::F32, rows).data);
    layer.dkernel = call.result("dkernel", x.element, matrix).data;
    layer.dbias =
        static_cast<float*>(call.result("dbias", ffi::DataType::F32, {layer.features}).data);
    plan.layers.push_back(layer);
  }
  call.shared();
  plan.dx = call.result("dx", x.element, {plan.batch, plan.width}).data;
  const Dims partial{count, plan.batch, plan.width};
  plan.partial = static_cast<float*>(call.result("partial", ffi::DataType::F32, partial).data);
  return plan;
}

}  // namespace jaxunet
