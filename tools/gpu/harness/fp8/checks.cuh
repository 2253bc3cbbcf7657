// Finds which number of x each output of kernel.cuh reads. The weights of one tap are a permutation
// of the channels, those of the others 0, so that every output is one number of x, and x is a digit
// of its own place.
#pragma once

#include <cstdio>

#include "reference.cuh"

namespace jaxunet::cuda::fp8 {

struct Place {
  int sample, row, column, channel;
};
// The digits of a place, each from 0 to 15: e4m3 has the numbers 1 to 16, and 0 is outside.
constexpr int kDigits = 6;
inline int digit(const Place& at, int n) {
  const int digits[kDigits] = {at.sample,       at.row % 16,
                               at.column % 16,  at.row / 16 * 4 + at.column / 16,
                               at.channel % 16, at.channel / 16};
  return digits[n];
}
inline Place place_of(const int (&d)[kDigits]) {
  return {d[0], d[3] / 4 * 16 + d[1], d[3] % 4 * 16 + d[2], d[5] * 16 + d[4]};
}
inline int source_channel(int feature) { return (5 * feature + 3) % kChannels; }

inline Place place_of(const Images& images, int64_t i) {
  const int64_t pixel = i / kChannels, row = pixel / images.size;
  return {static_cast<int>(row / images.size), static_cast<int>(row % images.size),
          static_cast<int>(pixel % images.size), static_cast<int>(i % kChannels)};
}

inline Bytes digits_of(const Images& images, int n) {
  Bytes x(images.numbers());
  for (int64_t i = 0; i < images.numbers(); ++i) {
    const auto value = static_cast<float>(digit(place_of(images, i), n) + 1);
    x[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  }
  return x;
}
inline Bytes permutation(int tap) {
  Bytes weights(kWeightBytes);
  for (int feature = 0; feature < kChannels; ++feature)
    weights[(tap * kChannels + feature) * kChannels + source_channel(feature)] = 0x38;  // 1
  return weights;
}

// What output i reads at a tap.
struct Source {
  Place at;
  bool inside;  // of the image; else a zero

  Source(const Images& images, int64_t i, int tap) : at(place_of(images, i)) {
    at = {at.sample, at.row + tap / 3 - 1, at.column + tap % 3 - 1, source_channel(at.channel)};
    inside = at.row >= 0 && at.row < images.size && at.column >= 0 && at.column < images.size;
  }
  float value(int n) const { return static_cast<float>(inside ? digit(at, n) + 1 : 0); }
};

// Prints what some wrong outputs of a tap read instead of their input. `found`: all
// outputs, digit by digit.
inline void explain(const Images& images, int tap, const std::vector<std::vector<float>>& found) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < images.numbers(); ++i) {
    const Source source(images, i, tap);
    bool right = true, readable = true;
    int digits[kDigits];
    for (int n = 0; n < kDigits; ++n) {
      const float value = found[n][i];
      right &= value == source.value(n);
      readable &= value >= 1 && value <= 16 && value == std::floor(value);
      digits[n] = readable ? static_cast<int>(value) - 1 : 0;
    }
    if (right) continue;
    ++wrong;
    if (wrong != 1 && wrong != 2 && wrong != 70 && wrong != 1000) continue;
    const Place at = place_of(images, i), got = place_of(digits);
    std::printf("    tap %d, output (%d, %d, %d, %d): reads ", tap, at.sample, at.row, at.column,
                at.channel);
    if (readable) {
      std::printf("(%d, %d, %d, %d)", got.sample, got.row, got.column, got.channel);
    } else {
      for (int n = 0; n < kDigits; ++n) std::printf("%s%g", n ? " " : "digits ", found[n][i]);
    }
    std::printf(", expected (%d, %d, %d, %d)%s\n", source.at.sample, source.at.row,
                source.at.column, source.at.channel, source.inside ? "" : ": outside, 0");
  }
  std::printf("    tap %d: %ld of %ld wrong\n", tap, long(wrong), long(images.numbers()));
}

// Returns true if every output reads its own input. run() computes y of (x8, w8), with scale 1 and
// no bias.
template <class Run>
bool reads_its_inputs(const Images& images, uint8_t* x8, uint8_t* w8, const __nv_bfloat16* y,
                      const Run& run) {
  int wrong_taps = 0;
  std::vector<Bytes> inputs;
  for (int n = 0; n < kDigits; ++n) inputs.push_back(digits_of(images, n));
  for (int tap = 0; tap < kTaps; ++tap) {
    upload(permutation(tap), w8);
    std::vector<std::vector<float>> found(kDigits);
    bool right = true;
    for (int n = 0; n < kDigits; ++n) {
      upload(inputs[n], x8);
      run();
      for (const auto value : download(y, images.numbers()))
        found[n].push_back(__bfloat162float(value));
      for (int64_t i = 0; right && i < images.numbers(); ++i)
        right = found[n][i] == Source(images, i, tap).value(n);
    }
    if (!right && ++wrong_taps <= 2) explain(images, tap, found);
  }
  return wrong_taps == 0;
}

}  // namespace jaxunet::cuda::fp8
