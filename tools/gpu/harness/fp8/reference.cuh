// What bench.cu compares kernel.cuh with: a plain kernel for the same arrays, whose sums are
// float32, and float64 sums of some pixels on the CPU, of the rounded operands and of those before
// rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "../graph_times.cuh"
#include "kernel.cuh"

namespace jaxunet::cuda::fp8 {

using Bytes = std::vector<uint8_t>;

// A batch of square images.
struct Images {
  int batch, size;
  int64_t pixels() const { return int64_t{batch} * size * size; }
  int64_t numbers() const { return pixels() * kChannels; }
};

template <class T>
T* allocate(int64_t count) {
  T* array;
  CHECK(cudaMalloc(&array, count * sizeof(T)));
  return array;
}
template <class T>
void upload(const std::vector<T>& from, T* to) {
  CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}
template <class T>
std::vector<T> download(const T* from, int64_t count) {
  std::vector<T> to(count);
  CHECK(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

constexpr float kImageScale = 16;  // an e4m3 of x stands for x · 16

// x = SiLU of Gaussian numbers, which depend only on their index; also rounded to both types.
__global__ void draw_images(int64_t count, float* x, uint8_t* x8, __nv_bfloat16* x16) {
  const auto hash = [](uint64_t v) {
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9u;
    v = (v ^ v >> 27) * 0x94d049bb133111ebu;
    return v ^ v >> 31;
  };
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = hash(hash(uint64_t(i) * 0x9e3779b97f4a7c15u + 1));
    const float a = (static_cast<float>(bits >> 40) + 0.5f) / 16777216.0f,
                b = static_cast<float>(bits & 0xffffff) / 16777216.0f;
    const float gaussian = sqrtf(-2 * logf(a)) * cospif(2 * b);
    x[i] = gaussian / (1 + expf(-gaussian));
    x8[i] = __nv_cvt_float_to_fp8(x[i] * kImageScale, __NV_SATFINITE, __NV_E4M3);
    x16[i] = __float2bfloat16(x[i]);
  }
}

// Gaussian weights and a bias, and the weights rounded to e4m3, whose range they fill, and bf16.
struct Weights {
  std::vector<float> exact, bias;   // (tap, output channel, channel)
  Bytes e4m3;                       // the same
  std::vector<__nv_bfloat16> bf16;  // (tap, channel, output channel)
  float scale;                      // of the product of an e4m3 of x and one of the weights

  Weights() : exact(kWeightBytes), bias(kChannels), e4m3(kWeightBytes), bf16(kWeightBytes) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    float largest = 0;
    for (float& w : exact) {
      w = normal(random) / std::sqrt(static_cast<float>(kTaps * kChannels));
      largest = std::max(largest, std::abs(w));
    }
    for (float& b : bias) b = 0.1f * normal(random);
    constexpr float kLargest = 448;  // e4m3
    const float fill = kLargest / largest;
    scale = 1 / (fill * kImageScale);
    for (int i = 0; i < kWeightBytes; ++i) {
      const int tap = i / kTapBytes, feature = i / kChannels % kChannels, channel = i % kChannels;
      e4m3[i] = __nv_cvt_float_to_fp8(exact[i] * fill, __NV_SATFINITE, __NV_E4M3);
      bf16[(tap * kChannels + channel) * kChannels + feature] = __float2bfloat16(exact[i]);
    }
  }
};

__device__ inline float number_of(uint8_t e4m3) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(e4m3, __NV_E4M3)));
}

// y = scale · convolution + bias. A block computes kPixels pixels, a thread one of their output
// channels.
__global__ void __launch_bounds__(kChannels)
    convolve_plainly(const uint8_t* x, const uint8_t* weights, const float* scale,
                     const float* bias, int size, int64_t pixels, float* y) {
  constexpr int kPixels = 8;
  __shared__ float row[kPixels][kChannels];
  const int64_t first = int64_t{blockIdx.x} * kPixels;
  float sums[kPixels] = {};
  for (int tap = 0; tap < kTaps; ++tap) {
    __syncthreads();
    for (int i = 0; i < kPixels; ++i) {
      const int64_t pixel = first + i;
      const int down = static_cast<int>(pixel / size % size) + tap / 3 - 1,
                across = static_cast<int>(pixel % size) + tap % 3 - 1;
      const bool inside =
          pixel < pixels && down >= 0 && down < size && across >= 0 && across < size;
      const int64_t from = pixel + (tap / 3 - 1) * size + tap % 3 - 1;
      row[i][threadIdx.x] = inside ? number_of(x[from * kChannels + threadIdx.x]) : 0;
    }
    __syncthreads();
    const uint8_t* own = weights + (tap * kChannels + threadIdx.x) * kChannels;
#pragma unroll 4
    for (int channel = 0; channel < kChannels; ++channel) {
      const float w = number_of(own[channel]);
      for (int i = 0; i < kPixels; ++i) sums[i] += w * row[i][channel];
    }
  }
  for (int i = 0; i < kPixels && first + i < pixels; ++i)
    y[(first + i) * kChannels + threadIdx.x] = sums[i] * scale[0] + bias[threadIdx.x];
}

struct Differences {
  unsigned long long wrong, first;  // first: the lowest wrong index
};

// Counts the numbers of y that differ by more than `margin` and the rounding of bf16, NaN included.
__global__ void compare(const __nv_bfloat16* y, const float* wanted, int64_t count, float margin,
                        Differences* found) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float error = fabsf(__bfloat162float(y[i]) - wanted[i]);
    if (error <= margin + fabsf(wanted[i]) / 256) continue;
    atomicAdd(&found->wrong, 1ull);
    atomicMin(&found->first, static_cast<unsigned long long>(i));
  }
}

// The number that an e4m3 stands for, without CUDA's conversions.
inline double exact_number(uint8_t e4m3) {
  const int exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return (e4m3 & 127) == 127 ? NAN : e4m3 & 128 ? -size : size;
}

// Some hundred pixels: the corners and random border pixels of three samples, and any others.
inline std::vector<int64_t> choose_pixels(const Images& images) {
  std::mt19937 random(11);
  const int last = images.size - 1;
  std::vector<int64_t> pixels;
  const auto add = [&](int sample, int row, int column) {
    pixels.push_back((int64_t{sample} * images.size + row) * images.size + column);
  };
  for (const int sample : {0, images.batch / 2, images.batch - 1}) {
    for (const int row : {0, last}) {
      for (const int column : {0, last}) add(sample, row, column);
    }
    for (int i = 0; i < 8; ++i) {
      for (const int edge : {0, last}) {
        add(sample, edge, static_cast<int>(random() % images.size));
        add(sample, static_cast<int>(random() % images.size), edge);
      }
    }
  }
  while (pixels.size() < 400) pixels.push_back(random() % images.pixels());
  return pixels;
}

// The outputs of the chosen pixels in float64: of the rounded operands, and of those before.
struct Exact {
  std::vector<int64_t> pixels;
  std::vector<double> rounded, before;

  Exact(const Images& images, const float* x, const uint8_t* x8, const Weights& weights)
      : pixels(choose_pixels(images)) {
    const auto host_x = download(x, images.numbers());
    const auto host_x8 = download(x8, images.numbers());
    std::vector<double> numbers(256);
    for (int i = 0; i < 256; ++i) numbers[i] = exact_number(static_cast<uint8_t>(i));
    for (const int64_t pixel : pixels) {
      for (int feature = 0; feature < kChannels; ++feature) {
        double of_rounded = 0, of_before = 0;
        for (int tap = 0; tap < kTaps; ++tap) {
          const int64_t down = pixel / images.size % images.size + tap / 3 - 1,
                        across = pixel % images.size + tap % 3 - 1;
          if (down < 0 || down >= images.size || across < 0 || across >= images.size) continue;
          const int64_t from = (pixel + (tap / 3 - 1) * images.size + tap % 3 - 1) * kChannels,
                        to = (tap * kChannels + feature) * kChannels;
          for (int k = 0; k < kChannels; ++k) {
            of_rounded += numbers[host_x8[from + k]] * numbers[weights.e4m3[to + k]];
            of_before += double{host_x[from + k]} * weights.exact[to + k];
          }
        }
        rounded.push_back(of_rounded * weights.scale + weights.bias[feature]);
        before.push_back(of_before + weights.bias[feature]);
      }
    }
  }

  double rms() const {
    return rms_of([&](size_t i) { return rounded[i]; });
  }
  template <class Value>
  double rms_of(const Value& value) const {
    double sum = 0;
    for (size_t i = 0; i < rounded.size(); ++i) sum += value(i) * value(i);
    return std::sqrt(sum / static_cast<double>(rounded.size()));
  }
  // The chosen pixels of y.
  std::vector<double> take(const __nv_bfloat16* y) const {
    std::vector<double> taken;
    for (const int64_t pixel : pixels) {
      for (const auto value : download(y + pixel * kChannels, kChannels))
        taken.push_back(__bfloat162float(value));
    }
    return taken;
  }
};

}  // namespace jaxunet::cuda::fp8
