// Projections on the CPU: plain loops, for tests and for machines without a GPU. plan.h has the
// formulas.
#include "binding/cpu.h"

namespace jaxunet::cpu {

void projections(const Projections& plan, Pool& pool) {
  const std::vector<float> x = widen(plan.x, plan.type, plan.batch * plan.width);
  parallel(pool, static_cast<int64_t>(plan.layers.size()), [&](int64_t i) {
    const Projection& layer = plan.layers[i];
    const std::vector<float> kernel =
        layer.kernel ? widen(layer.kernel, plan.type, plan.width * layer.features)
                     : std::vector<float>();
    for (int64_t sample = 0; sample < (layer.kernel ? plan.batch : 1); ++sample) {
      for (int64_t c = 0; c < layer.features; ++c) {
        double sum = 0;
        for (const float* const bias : layer.biases) sum += bias ? bias[c] : 0;
        for (int64_t k = 0; layer.kernel && k < plan.width; ++k)
          sum += static_cast<double>(x[sample * plan.width + k]) * kernel[k * layer.features + c];
        layer.y[sample * layer.features + c] = static_cast<float>(sum);
      }
    }
  });
}

void projection_gradients(const ProjectionGradients& plan, Pool& pool) {
  const int64_t rows = plan.batch * plan.width;
  const std::vector<float> x = widen(plan.x, plan.type, rows);
  parallel(pool, static_cast<int64_t>(plan.layers.size()), [&](int64_t i) {
    const ProjectionGradient& layer = plan.layers[i];
    const int64_t features = layer.features;
    const std::vector<float> kernel = widen(layer.kernel, plan.type, plan.width * features);
    std::vector<float> dkernel(plan.width * features),
        dy(layer.dy, layer.dy + plan.batch * features);
    round_to(plan.type, dy);
    for (int64_t c = 0; c < features; ++c) {
      double sum = 0;
      for (int64_t sample = 0; sample < plan.batch; ++sample)
        sum += layer.dy[sample * features + c];
      layer.dbias[c] = static_cast<float>(sum);
    }
    for (int64_t k = 0; k < plan.width; ++k) {
      for (int64_t c = 0; c < features; ++c) {
        double sum = 0;
        for (int64_t sample = 0; sample < plan.batch; ++sample)
          sum += static_cast<double>(x[sample * plan.width + k]) * dy[sample * features + c];
        dkernel[k * features + c] = static_cast<float>(sum);
      }
    }
    narrow(dkernel, plan.type, layer.dkernel);
    for (int64_t sample = 0; sample < plan.batch; ++sample) {
      for (int64_t k = 0; k < plan.width; ++k) {
        double sum = 0;
        for (int64_t c = 0; c < features; ++c)
          sum += static_cast<double>(dy[sample * features + c]) * kernel[k * features + c];
        plan.partial[i * rows + sample * plan.width + k] = static_cast<float>(sum);
      }
    }
  });
  std::vector<float> dx(rows);
  for (int64_t at = 0; at < rows; ++at) {
    double sum = 0;
    for (size_t i = 0; i < plan.layers.size(); ++i) sum += plan.partial[i * rows + at];
    dx[at] = static_cast<float>(sum);
  }
  narrow(dx, plan.type, plan.dx);
}

}  // namespace jaxunet::cpu
