#include "../cpu.h"

namespace jaxunet::cpu {

void moments(const Moments& plan, Pool& pool) {
  const auto x = widen(plan.x, plan.type, plan.batch * plan.pixels * plan.channels);
  parallel(pool, plan.batch * plan.channels, [&](int64_t unit) {
    const float* first = x.data() + unit / plan.channels * plan.pixels * plan.channels + unit % plan.channels;
    double mean = 0, deviation = 0;
    for (int64_t p = 0; p < plan.pixels; ++p) mean += first[p * plan.channels];
    mean /= static_cast<double>(plan.pixels);
    for (int64_t p = 0; p < plan.pixels; ++p) {
      const double away = first[p * plan.channels] - mean;
      deviation += away * away;
    }
    plan.moments[2 * unit] = static_cast<float>(mean);
    plan.moments[2 * unit + 1] = static_cast<float>(deviation / static_cast<double>(plan.pixels));
  });
}

void norm_apply(const NormApply& plan, Pool& pool) {
  auto x = join(plan.x, plan.type, plan.batch * plan.pixels);
  affine(pool, x, plan.batch, plan.x.total, plan.a, plan.b, plan.silu);
  narrow(x, plan.type, plan.y);
}

void norm_gradient(const NormGradient& plan, Pool& pool) {
  const int64_t channels = plan.x.total, pixels = plan.pixels, size = channels / plan.groups;
  const auto x = join(plan.x, plan.type, plan.batch * pixels);
  const auto dy = widen(plan.dy, plan.type, plan.batch * pixels * channels);
  std::vector<float> dx(x.size());
  parallel(pool, plan.batch * plan.groups, [&](int64_t unit) {
    const int64_t sample = unit / plan.groups, start = unit % plan.groups * size;
    double constant = 0, slope = 0;  // sums over the group of scale · dz and of scale · dz · n
    const auto walk = [&](const auto& visit) {
      for (int64_t c = start; c < start + size; ++c) {
        const auto at = [&](const Rows& rows) { return static_cast<double>(rows.data[sample * rows.stride + c]); };
        const double scale = at(plan.scale), offset = at(plan.offset), mean = at(plan.mean), inverse = at(plan.inverse);
        double s1 = 0, s2 = 0;
        for (int64_t p = 0; p < pixels; ++p) {
          const int64_t i = (sample * pixels + p) * channels + c;
          const double n = (x[i] - mean) * inverse, z = scale * n + offset;
          double dz = dy[i];
          if (plan.silu) {
            const double s = 1 / (1 + std::exp(-z));
            dz *= s * (1 + z * (1 - s));
          }
          s1 += dz;
          s2 += dz * n;
          visit(i, scale, inverse, n, dz);
        }
        plan.sums[2 * sample * channels + c] = static_cast<float>(s1);
        plan.sums[(2 * sample + 1) * channels + c] = static_cast<float>(s2);
      }
    };
    walk([&](int64_t, double scale, double, double n, double dz) {
      constant += scale * dz;
      slope += scale * dz * n;
    });
    const double elements = static_cast<double>(size) * static_cast<double>(pixels);
    walk([&](int64_t i, double scale, double inverse, double n, double dz) {
      dx[i] = static_cast<float>(inverse * (scale * dz - (constant + n * slope) / elements));
    });
  });
  split(dx, plan.type, plan.batch * pixels, plan.dx);
}

}  // namespace jaxunet::cpu
