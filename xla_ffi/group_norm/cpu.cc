// GroupNorm on the CPU: plain loops with float64 sums, for tests and for machines without a GPU.
// plan.h has the formulas.
#include "binding/cpu.h"

namespace jaxunet::cpu {
namespace {

// mean and inverse = 1 / sqrt(variance + eps) of the group of each (sample, channel), in float64.
struct GroupStatistics {
  std::vector<double> mean, inverse;
};

// Reduces all batch * groups groups in parallel, in two passes: the mean, then the variance.
GroupStatistics statistics_of(const NormInput& plan, const std::vector<float>& x, Pool& pool) {
  const int64_t channels = plan.x.total, pixels = plan.pixels, size = channels / plan.groups;
  GroupStatistics found{std::vector<double>(plan.batch * channels),
                        std::vector<double>(plan.batch * channels)};
  parallel(pool, plan.batch * plan.groups, [&](int64_t unit) {
    const int64_t sample = unit / plan.groups, start = unit % plan.groups * size;
    const auto elements = static_cast<double>(size) * static_cast<double>(pixels);
    const auto sum = [&](const auto& term) {
      double total = 0;
      for (int64_t p = 0; p < pixels; ++p) {
        const float* pixel = x.data() + (sample * pixels + p) * channels;
        for (int64_t c = start; c < start + size; ++c) total += term(static_cast<double>(pixel[c]));
      }
      return total / elements;
    };
    const double mean = sum([](double v) { return v; });
    const double variance = sum([&](double v) { return (v - mean) * (v - mean); });
    for (int64_t c = start; c < start + size; ++c) {
      found.mean[sample * channels + c] = mean;
      found.inverse[sample * channels + c] =
          1 / std::sqrt(variance + static_cast<double>(plan.eps));
    }
  });
  return found;
}

// Calls visit(sample, channel, index, scale, offset) for each (sample, channel).
template <class Visit>
void each_channel(const NormInput& plan, const Visit& visit) {
  for (int64_t sample = 0; sample < plan.batch; ++sample) {
    for (int64_t c = 0; c < plan.x.total; ++c) {
      visit(sample, c, sample * plan.x.total + c,
            static_cast<double>(plan.scale.data[sample * plan.scale.stride + c]),
            static_cast<double>(plan.offset.data[sample * plan.offset.stride + c]));
    }
  }
}

// The finalizer of MurmurHash3.
uint32_t mix_bits(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}

// Applies dropout to (batch, pixels, channels); values are rounded to the type before and
// afterwards.
void apply_dropout(const Dropout& dropout, Type type, int64_t batch, std::vector<float>& values) {
  round_to(type, values);
  const size_t size = values.size() / std::max<int64_t>(batch, 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t* const seeds = dropout.seeds + 2 * (i / size);
    const auto position = static_cast<uint32_t>(i % size);
    const uint32_t word = mix_bits(mix_bits((position >> 1) ^ seeds[0]) + seeds[1]);
    const uint32_t bits = position % 2 ? word >> 16 : word & 0xFFFFu;
    values[i] = bits < dropout.threshold ? 0.0f : values[i] * dropout.factor;
  }
  round_to(type, values);
}

}  // namespace

void norm_forward(const NormForward& plan, Pool& pool) {
  auto x = join(plan.x, plan.type, plan.batch * plan.pixels);
  const GroupStatistics groups = statistics_of(plan, x, pool);
  const int64_t channels = plan.x.total;
  each_channel(plan, [&](int64_t sample, int64_t c, int64_t i, double scale, double offset) {
    plan.mean[i] = static_cast<float>(groups.mean[i]);
    plan.inverse[i] = static_cast<float>(groups.inverse[i]);
    for (int64_t p = 0; p < plan.pixels; ++p) {
      float& value = x[(sample * plan.pixels + p) * channels + c];
      const double z = (value - groups.mean[i]) * groups.inverse[i] * scale + offset;
      value = static_cast<float>(plan.silu ? z / (1 + std::exp(-z)) : z);
    }
  });
  if (plan.dropout.seeds) apply_dropout(plan.dropout, plan.type, plan.batch, x);
  narrow(x, plan.type, plan.y);
}

void norm_dropout_forward(const NormForward& plan, Pool& pool) { norm_forward(plan, pool); }

void norm_statistics(const NormStatistics& plan, Pool& pool) {
  const GroupStatistics groups =
      statistics_of(plan, join(plan.x, plan.type, plan.batch * plan.pixels), pool);
  each_channel(plan, [&](int64_t, int64_t, int64_t i, double scale, double offset) {
    plan.mean[i] = static_cast<float>(groups.mean[i]);
    plan.inverse[i] = static_cast<float>(groups.inverse[i]);
    plan.a[i] = static_cast<float>(scale * groups.inverse[i]);
    plan.b[i] = static_cast<float>(offset - groups.mean[i] * groups.inverse[i] * scale);
  });
}

namespace {

// One group of a sample, in two passes over its elements: the first reduces, the second writes dx.
void group_gradient(const NormGradient& plan, int64_t sample, int64_t group,
                    const std::vector<float>& x, const std::vector<float>& dy,
                    const std::vector<std::vector<float>>& added, std::vector<float>& dx,
                    std::vector<float>& active) {
  const int64_t channels = plan.x.total, pixels = plan.pixels, size = channels / plan.groups,
                start = group * size;
  // Calls visit(index, scale, inverse, n, dz) for each element; writes the channels' sums.
  const auto walk = [&](const auto& visit) {
    for (int64_t c = start; c < start + size; ++c) {
      const auto at = [&](const Rows& rows) {
        return static_cast<double>(rows.data[sample * rows.stride + c]);
      };
      const double scale = at(plan.scale), offset = at(plan.offset), mean = at(plan.mean),
                   inverse = at(plan.inverse);
      double sum_dz = 0, sum_dz_n = 0;
      for (int64_t p = 0; p < pixels; ++p) {
        const int64_t i = (sample * pixels + p) * channels + c;
        const double n = (x[i] - mean) * inverse, z = scale * n + offset;
        double dz = dy[i], s = 1;
        if (plan.silu) {
          s = 1 / (1 + std::exp(-z));
          dz *= s * (1 + z * (1 - s));
        }
        if (plan.active) active[i] = static_cast<float>(z * s);
        sum_dz += dz;
        sum_dz_n += dz * n;
        visit(i, scale, inverse, n, dz);
      }
      plan.sums[2 * sample * channels + c] = static_cast<float>(sum_dz);
      plan.sums[(2 * sample + 1) * channels + c] = static_cast<float>(sum_dz_n);
    }
  };
  double constant = 0, slope = 0;  // sums of scale * dz and of scale * dz * n over the group
  walk([&](int64_t, double scale, double, double n, double dz) {
    constant += scale * dz;
    slope += scale * dz * n;
  });
  const double elements = static_cast<double>(size) * static_cast<double>(pixels);
  walk([&](int64_t i, double scale, double inverse, double n, double dz) {
    double total = inverse * (scale * dz - (constant + n * slope) / elements);
    for (const auto& other : added) total += static_cast<double>(other[i]);
    dx[i] = static_cast<float>(total);
  });
}

// Computes the gradient of offset (which = 0) or scale (1) from plan.sums. `rows`: that parameter.
void parameter_gradient(const NormGradient& plan, const Rows& rows, int64_t which, float* to) {
  const int64_t channels = plan.x.total;
  for (int64_t c = 0; c < channels; ++c) {
    double total = 0;
    for (int64_t sample = 0; sample < plan.batch; ++sample) {
      const float sum = plan.sums[(2 * sample + which) * channels + c];
      total += static_cast<double>(sum);
      if (rows.stride > 0) to[sample * channels + c] = sum;
    }
    if (rows.stride == 0) to[c] = static_cast<float>(total);
  }
}

}  // namespace

void norm_gradient(const NormGradient& plan, Pool& pool) {
  const int64_t rows = plan.batch * plan.pixels;
  const auto x = join(plan.x, plan.type, rows);
  auto dy = widen(plan.dy, plan.type, rows * plan.x.total);
  if (plan.dropout.seeds) apply_dropout(plan.dropout, plan.type, plan.batch, dy);
  std::vector<std::vector<float>> added;
  for (int k = 0; k < plan.added_count; ++k) added.push_back(join(plan.added[k], plan.type, rows));
  std::vector<float> dx(x.size()), active(plan.active ? x.size() : 0);
  parallel(pool, plan.batch * plan.groups, [&](int64_t unit) {
    group_gradient(plan, unit / plan.groups, unit % plan.groups, x, dy, added, dx, active);
  });
  if (plan.parameter_gradients) {
    parameter_gradient(plan, plan.offset, 0, plan.doffset);
    parameter_gradient(plan, plan.scale, 1, plan.dscale);
  }
  split(dx, plan.type, rows, plan.dx);
  if (plan.active) narrow(active, plan.type, plan.active);
}

void norm_dropout_gradient(const NormGradient& plan, Pool& pool) { norm_gradient(plan, pool); }

}  // namespace jaxunet::cpu
