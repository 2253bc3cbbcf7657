// Shared by the emulation and the checks on a GPU: calls with awkward shapes, their plans, exact
// results, and the allowed error.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/host_device.h"
#include "conv3x3/plan.h"

namespace harness {

using jaxunet::Conv3x3;
using jaxunet::Conv3x3WeightGradient;
using jaxunet::Parts;
using jaxunet::Type;

// `flipped`: the input gradient, which reads the kernel rotated by 180 degrees and transposed.
struct Case {
  int batch, height, width;
  std::vector<int> parts;  // channels of x; empty: a linear layer
  int features;
  std::vector<int> projected = {}, residual = {};
  bool flipped = false;
  int shift = 0;  // 0: none; 1: one for all samples; 2: one per sample
};

// Small enough for the emulation. They have several parts, some without channels, and numbers of
// pixels, features and channels that do not fill the tiles.
inline const std::vector<Case> kSmall = {
    {1, 4, 4, {64}, 64, {}, {64}, false, 1},
    {3, 9, 7, {32, 16}, 24, {8, 0, 16}, {}, false, 2},
    {3, 9, 7, {40, 0, 8}, 72, {}, {48, 24}, true, 2},
    {2, 5, 12, {72}, 40, {}, {}, false, 1},
    {2, 5, 12, {72}, 136, {}, {}, true, 0},
    {1, 3, 50, {8, 8, 24, 8}, 8, {}, {8}, false, 1},
    {3, 4, 4, {}, 104, {64, 40}, {}, false, 1},
    {3, 4, 4, {}, 88, {72}, {64, 24}, true, 0},
    {1, 1, 1, {16}, 16, {}, {}, false, 2},
    {2, 2, 67, {0, 24}, 64, {136}, {}, true, 2},
    {1, 17, 16, {8}, 200, {8, 8, 8, 40}, {}, false, 0},
    {1, 4, 8, {8, 8, 8, 8}, 16, {8, 8, 40, 8}, {}, true, 0},
};

// Images up to 64 × 64, batches up to 32.
inline const std::vector<Case> kLarge = {
    {32, 4, 4, {256, 128}, 256, {256, 128}, {}, false, 2},
    {32, 8, 8, {256, 192}, 256, {}, {256}, false, 2},
    {32, 8, 8, {256}, 192, {}, {}, true, 0},
    {3, 16, 16, {192, 72}, 200, {192, 72}, {}, false, 1},
    {1, 64, 64, {128, 64}, 64, {}, {64}, false, 2},
    {3, 64, 64, {64}, 136, {}, {}, true, 1},
    {32, 32, 32, {128}, 128, {64, 128}, {}, false, 2},
    {32, 16, 16, {}, 576, {192}, {}, false, 1},
    {1, 64, 64, {}, 72, {264}, {72}, true, 0},
};

// How an array is used. kInput and kOutput have the 16-bit type of the call.
enum class Kind { kInput, kFloatInput, kOutput, kFloatOutput };

// `take(count, kind)` returns memory for an array of `count` numbers.
template <class Take>
Parts parts_of(const std::vector<int>& widths, int64_t pixels, Take&& take, Kind kind) {
  Parts parts;
  for (const int width : widths) {
    parts.data[parts.count] = take(pixels * width, kind);
    parts.channels[parts.count++] = width;
    parts.total += width;
  }
  return parts;
}

inline int64_t pixels_of(const Case& c) {
  return static_cast<int64_t>(c.batch) * c.height * c.width;
}

// The fields that both kinds of plans have.
template <class Plan, class Take>
Plan common_plan(const Case& c, Type type, Take&& take) {
  Plan plan{};
  plan.type = type;
  plan.batch = c.batch;
  plan.height = c.height;
  plan.width = c.width;
  plan.features = c.features;
  plan.x = parts_of(c.parts, pixels_of(c), take, Kind::kInput);
  plan.projected = parts_of(c.projected, pixels_of(c), take, Kind::kInput);
  return plan;
}

template <class Take>
Conv3x3 forward_plan(const Case& c, Type type, Take&& take) {
  const int64_t pixels = pixels_of(c);
  auto plan = common_plan<Conv3x3>(c, type, take);
  plan.flipped = c.flipped;
  plan.residual = parts_of(c.residual, pixels, take, Kind::kInput);
  plan.kernel = take(9 * plan.x.total * c.features, Kind::kInput);
  plan.shortcut = take(plan.projected.total * c.features, Kind::kInput);
  if (c.shift) {
    const int rows = c.shift == 1 ? 1 : c.batch;
    plan.shift = {
        static_cast<const float*>(take(static_cast<int64_t>(rows) * c.features, Kind::kFloatInput)),
        c.shift == 1 ? 0 : c.features};
  }
  plan.y = parts_of({c.features}, pixels, take, Kind::kOutput);
  return plan;
}

// The plan's workspace holds the partial results of `splits` splits: first those of the kernel's
// gradient, then those of the shortcut's.
template <class Take>
Conv3x3WeightGradient weight_gradient_plan(const Case& c, Type type, int splits, Take&& take) {
  auto plan = common_plan<Conv3x3WeightGradient>(c, type, take);
  plan.dy = take(pixels_of(c) * c.features, Kind::kInput);
  plan.workspace_floats = splits * (9 * plan.x.total + plan.projected.total) * c.features;
  plan.workspace = static_cast<float*>(take(plan.workspace_floats, Kind::kFloatOutput));
  return plan;
}
inline float* shortcut_partials(const Conv3x3WeightGradient& plan, int splits) {
  return plan.workspace + splits * 9 * plan.x.total * plan.features;
}

// An exact result: a sum, and the sum of its terms' magnitudes.
struct Exact {
  double sum = 0, magnitude = 0;
  JAXUNET_HOST_DEVICE void add(double term) {
    sum += term;
    magnitude += term < 0 ? -term : term;
  }
};

JAXUNET_HOST_DEVICE inline double number(const __half* from) { return __half2float(*from); }
JAXUNET_HOST_DEVICE inline double number(const __nv_bfloat16* from) {
  return __bfloat162float(*from);
}

template <class T>
JAXUNET_HOST_DEVICE double entry(const Parts& parts, int64_t pixel, int64_t channel) {
  int part = 0;
  while (channel >= parts.channels[part]) channel -= parts.channels[part++];
  return number(static_cast<const T*>(parts.data[part]) + pixel * parts.channels[part] + channel);
}

// The value of x that a tap of a pixel reads; 0 in the padding.
template <class T, class Plan>
JAXUNET_HOST_DEVICE double neighbour(const Plan& plan, int64_t pixel, int tap, int64_t channel) {
  const int64_t y = pixel / plan.width % plan.height + tap / 3 - 1,
                x = pixel % plan.width + tap % 3 - 1;
  if (y < 0 || x < 0 || y >= plan.height || x >= plan.width) return 0;
  return entry<T>(plan.x, pixel + (tap / 3 - 1) * plan.width + tap % 3 - 1, channel);
}

template <class T>
JAXUNET_HOST_DEVICE Exact exact(const Conv3x3& plan, int64_t pixel, int64_t feature) {
  const auto* kernel = static_cast<const T*>(plan.kernel);
  const auto* shortcut = static_cast<const T*>(plan.shortcut);
  const int64_t channels = plan.x.total, projected = plan.projected.total, f = plan.features;
  Exact result;
  for (int tap = 0; tap < 9; ++tap) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t at = plan.flipped ? ((8 - tap) * f + feature) * channels + c
                                      : (tap * channels + c) * f + feature;
      result.add(neighbour<T>(plan, pixel, tap, c) * number(kernel + at));
    }
  }
  for (int64_t c = 0; c < projected; ++c) {
    const int64_t at = plan.flipped ? feature * projected + c : c * f + feature;
    result.add(entry<T>(plan.projected, pixel, c) * number(shortcut + at));
  }
  const int64_t sample = pixel / (plan.height * plan.width);
  if (plan.shift.data) result.add(plan.shift.data[sample * plan.shift.stride + feature]);
  if (plan.residual.count) result.add(entry<T>(plan.residual, pixel, feature));
  return result;
}

// `row`: tap · channels + channel, or 9 · channels + projected channel.
template <class T>
JAXUNET_HOST_DEVICE Exact exact(const Conv3x3WeightGradient& plan, int64_t row, int64_t feature) {
  const int64_t channels = plan.x.total, pixels = plan.batch * plan.height * plan.width;
  const auto* dy = static_cast<const T*>(plan.dy);
  Exact result;
  for (int64_t pixel = 0; pixel < pixels; ++pixel) {
    const double x =
        row < 9 * channels
            ? neighbour<T>(plan, pixel, static_cast<int>(row / channels), row % channels)
            : entry<T>(plan.projected, pixel, row - 9 * channels);
    result.add(x * number(dy + pixel * plan.features + feature));
  }
  return result;
}

// The sum of all splits' partial results for an entry of the weight gradient.
JAXUNET_HOST_DEVICE inline double partial_sum(const Conv3x3WeightGradient& plan, int splits,
                                              int64_t row, int64_t feature) {
  const int64_t taps = 9 * plan.x.total, projected = plan.projected.total;
  double sum = 0;
  for (int64_t split = 0; split < splits; ++split) {
    const int64_t at =
        row < taps ? split * taps + row : splits * taps + split * projected + row - taps;
    sum += static_cast<double>(plan.workspace[at * plan.features + feature]);
  }
  return sum;
}

// The allowed error: that of a float32 sum in any order, where tensor cores truncate, plus the
// rounding of the result to bfloat16 or float16. A missing term of usual size, one of a few
// thousand, exceeds it.
constexpr double kSumError = 1.0 / (1 << 16);
template <class T>
constexpr double kHalfUlp = std::is_same_v<T, __half> ? 1.0 / 2048 : 1.0 / 256;
template <class T>
JAXUNET_HOST_DEVICE double allowed(const Exact& result, bool rounded) {
  const double size = result.sum < 0 ? -result.sum : result.sum;
  // 1e-7: float16 numbers below 2^-14 are rounded to multiples of 2^-24.
  return kSumError * result.magnitude + (rounded ? 1.01 * kHalfUlp<T> * size + 1e-7 : 0);
}

}  // namespace harness
