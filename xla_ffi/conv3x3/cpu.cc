// The convolution and its gradients on the CPU: plain loops with float64 sums, for tests and for
// machines without a GPU. plan.h has the formulas.
#include "binding/cpu.h"

namespace jaxunet::cpu {
namespace {

// The kernel as (3, 3, channels, features), flipped or not.
std::vector<float> kernel_of(const Conv3x3& plan) {
  const int64_t channels = plan.x.total, features = plan.features;
  auto given = widen(plan.kernel, plan.type, 9 * channels * features);
  if (!plan.flipped) return given;
  std::vector<float> turned(given.size());
  for (int64_t tap = 0; tap < 9; ++tap) {
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t f = 0; f < features; ++f) {
        turned[(tap * channels + c) * features + f] =
            given[((8 - tap) * features + f) * channels + c];
      }
    }
  }
  return turned;
}

// The shortcut as (projected channels, features), flipped or not.
std::vector<float> shortcut_of(const Conv3x3& plan) {
  if (!plan.shortcut) return {};
  const int64_t channels = plan.projected.total, features = plan.features;
  auto given = widen(plan.shortcut, plan.type, channels * features);
  if (!plan.flipped) return given;
  std::vector<float> turned(given.size());
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t f = 0; f < features; ++f) turned[c * features + f] = given[f * channels + c];
  }
  return turned;
}

// act(x); the padding is zero after the activation.
std::vector<float> input_of(const Conv3x3& plan, Pool& pool) {
  auto x = join(plan.x, plan.type, plan.batch * plan.height * plan.width);
  if (plan.a.data) affine_silu(pool, x, plan.batch, plan.x.total, plan.a, plan.b);
  return x;
}

// sums[f] += x[c] · matrix[c, f]
void accumulate(const float* x, const float* matrix, int64_t channels, std::vector<double>& sums) {
  const auto features = static_cast<int64_t>(sums.size());
  for (int64_t c = 0; c < channels; ++c) {
    const double value = x[c];
    for (int64_t f = 0; f < features; ++f) sums[f] += value * matrix[c * features + f];
  }
}

}  // namespace

void conv3x3(const Conv3x3& plan, Pool& pool) {
  const int64_t channels = plan.x.total, features = plan.features, extra = plan.projected.total;
  const int64_t pixels = plan.batch * plan.height * plan.width;
  const auto x = input_of(plan, pool), kernel = kernel_of(plan);
  const Type type = plan.wide ? Type::kFloat32 : plan.type;  // type of y and the residual
  const auto residual = join(plan.residual, type, pixels),
             projected = join(plan.projected, plan.type, pixels);
  const auto shortcut = shortcut_of(plan);
  std::vector<float> y(pixels * features);
  parallel(pool, plan.batch * plan.height, [&](int64_t line) {
    const int64_t sample = line / plan.height, row = line % plan.height;
    std::vector<double> sums(features);
    for (int64_t column = 0; column < plan.width; ++column) {
      const int64_t pixel = line * plan.width + column;
      for (int64_t f = 0; f < features; ++f) {
        sums[f] = plan.shift.data ? plan.shift.data[sample * plan.shift.stride + f] : 0;
      }
      for (int64_t tap = 0; tap < 9 && channels > 0; ++tap) {
        const int64_t down = tap / 3 - 1, right = tap % 3 - 1;
        if (row + down < 0 || row + down >= plan.height || column + right < 0 ||
            column + right >= plan.width)
          continue;
        const float* from = x.data() + (pixel + down * plan.width + right) * channels;
        accumulate(from, kernel.data() + tap * channels * features, channels, sums);
      }
      accumulate(projected.data() + pixel * extra, shortcut.data(), extra, sums);
      for (int64_t f = 0; f < plan.residual.total; ++f) sums[f] += residual[pixel * features + f];
      for (int64_t f = 0; f < features; ++f) y[pixel * features + f] = static_cast<float>(sums[f]);
    }
  });
  split(y, type, pixels, plan.y);
}

void conv3x3_shortcut_gradient(const Conv3x3& plan, Pool& pool) { conv3x3(plan, pool); }

void conv3x3_upsampled(const UpsampledConv3x3& plan, Pool& pool) {
  const int64_t channels = plan.channels, features = plan.features, height = plan.height,
                width = plan.width, small = plan.batch * height * width;
  const auto x = widen(plan.x, plan.type, (plan.flipped ? 4 : 1) * small * channels);
  auto kernel = widen(plan.kernel, plan.type, 16 * channels * features);
  if (plan.flipped) {  // to (16, channels, features)
    const auto given = kernel;
    for (int64_t tap = 0; tap < 16; ++tap) {
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t f = 0; f < features; ++f) {
          kernel[(tap * channels + c) * features + f] = given[(tap * features + f) * channels + c];
        }
      }
    }
  }
  // The index in the large image of pixel (i, j) of a phase.
  const auto large = [&](int64_t sample, int64_t i, int64_t j, int64_t phase) {
    return ((sample * height + i) * 2 + phase / 2) * 2 * width + 2 * j + phase % 2;
  };
  std::vector<float> y((plan.flipped ? 1 : 4) * small * features);
  parallel(pool, plan.batch * height, [&](int64_t line) {
    const int64_t sample = line / height, i = line % height;
    std::vector<double> sums(features);
    const auto add = [&](int64_t j, int64_t phase) {
      for (int64_t tap = 0; tap < 4; ++tap) {
        const int64_t down = tap / 2 + phase / 2 - 1, right = tap % 2 + phase % 2 - 1;
        const int64_t row = plan.flipped ? i - down : i + down,
                      column = plan.flipped ? j - right : j + right;
        if (row < 0 || row >= height || column < 0 || column >= width) continue;
        const int64_t pixel = plan.flipped ? large(sample, row, column, phase)
                                           : (sample * height + row) * width + column;
        accumulate(x.data() + pixel * channels,
                   kernel.data() + (phase * 4 + tap) * channels * features, channels, sums);
      }
    };
    const auto put = [&](int64_t pixel) {
      for (int64_t f = 0; f < features; ++f) {
        const float shift =
            plan.shift.data ? plan.shift.data[sample * plan.shift.stride + f] : 0.0f;
        y[pixel * features + f] = static_cast<float>(sums[f] + shift);
        sums[f] = 0;
      }
    };
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t phase = 0; phase < 4; ++phase) {
        add(j, phase);
        if (!plan.flipped) put(large(sample, i, j, phase));
      }
      if (plan.flipped) put(line * width + j);
    }
  });
  narrow(y, plan.type, plan.y);
}

void conv3x3_upsampled_weight_gradient(const UpsampledWeightGradient& plan, Pool& pool) {
  const int64_t large = plan.batch * 4 * plan.height * plan.width, width = 2 * plan.width,
                channels = plan.channels;
  const auto small = widen(plan.x, plan.type, large / 4 * channels);
  std::vector<float> nearest(large * channels);
  parallel(pool, large / width, [&](int64_t line) {
    for (int64_t column = 0; column < width; ++column) {
      const float* from = small.data() + (line / 2 * plan.width + column / 2) * channels;
      std::copy(from, from + channels, nearest.data() + (line * width + column) * channels);
    }
  });
  const auto dy = widen(plan.dy, plan.type, large * plan.features);
  Conv3x3WeightGradient wide{};
  wide.type = Type::kFloat32;
  wide.batch = plan.batch;
  wide.height = 2 * plan.height;
  wide.width = width;
  wide.features = plan.features;
  wide.x = {1, {nearest.data()}, {channels}, channels};
  wide.dy = dy.data();
  wide.dkernel = plan.dkernel;
  wide.dshift = plan.dshift;
  wide.shifts = plan.shifts;
  conv3x3_weight_gradient(wide, pool);
}

void add_samples(const NormSums& norm) {
  for (int64_t c = 0; c < norm.channels; ++c) {
    double offset = 0, scale = 0;
    for (int64_t sample = 0; sample < norm.batch; ++sample) {
      const float* of_sample = norm.sums + 2 * sample * norm.channels + c;
      offset += static_cast<double>(of_sample[0]);
      scale += static_cast<double>(of_sample[norm.channels]);
    }
    norm.of_offset[c] = static_cast<float>(offset);
    norm.of_scale[c] = static_cast<float>(scale);
  }
}

void conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, Pool& pool) {
  const int64_t channels = plan.x.total, features = plan.features, image = plan.height * plan.width;
  const auto x = join(plan.x, plan.type, plan.batch * image),
             dy = widen(plan.dy, plan.type, plan.batch * image * features);
  std::vector<float> dkernel(9 * channels * features), dshift(plan.shifts * features);
  parallel(pool, 9 * channels, [&](int64_t unit) {
    const int64_t tap = unit / channels, c = unit % channels, down = tap / 3 - 1,
                  right = tap % 3 - 1;
    std::vector<double> sums(features);
    for (int64_t pixel = 0; pixel < plan.batch * image; ++pixel) {
      const int64_t row = pixel % image / plan.width + down, column = pixel % plan.width + right;
      if (row < 0 || row >= plan.height || column < 0 || column >= plan.width) continue;
      const double value = x[(pixel + down * plan.width + right) * channels + c];
      for (int64_t f = 0; f < features; ++f) sums[f] += value * dy[pixel * features + f];
    }
    for (int64_t f = 0; f < features; ++f)
      dkernel[unit * features + f] = static_cast<float>(sums[f]);
  });
  const int64_t extra = plan.projected.total;
  const auto projected = join(plan.projected, plan.type, plan.batch * image);
  std::vector<float> dshortcut(extra * features);
  parallel(pool, extra, [&](int64_t c) {
    std::vector<double> sums(features);
    for (int64_t pixel = 0; pixel < plan.batch * image; ++pixel) {
      const double value = projected[pixel * extra + c];
      for (int64_t f = 0; f < features; ++f) sums[f] += value * dy[pixel * features + f];
    }
    for (int64_t f = 0; f < features; ++f)
      dshortcut[c * features + f] = static_cast<float>(sums[f]);
  });
  const int64_t share = plan.shifts ? plan.batch / plan.shifts * image : 0;
  parallel(pool, plan.shifts, [&](int64_t row) {
    std::vector<double> sums(features);
    for (int64_t pixel = row * share; pixel < (row + 1) * share; ++pixel) {
      for (int64_t f = 0; f < features; ++f) sums[f] += dy[pixel * features + f];
    }
    for (int64_t f = 0; f < features; ++f) dshift[row * features + f] = static_cast<float>(sums[f]);
  });
  add_samples(plan.norm);
  if (channels > 0) narrow(dkernel, plan.dkernel.type, plan.dkernel.data);
  narrow(dshift, plan.dshift.type, plan.dshift.data);
  if (extra > 0) narrow(dshortcut, plan.dshortcut.type, plan.dshortcut.data);
}

}  // namespace jaxunet::cpu
