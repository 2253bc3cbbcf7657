// What the checks hand to the kernels: plain data, the same for the CPU and the CUDA build, free of ffi.h, which is
// slow under nvcc.
#pragma once

#include <array>
#include <cstdint>

namespace jaxunet {

enum class Type { kFloat32, kFloat16, kBfloat16 };

constexpr int kMaxParts = 4;

// An NHWC tensor whose channels come from one or more arrays, one after the other.
struct Parts {
  int count = 0;
  std::array<void*, kMaxParts> data{};
  std::array<int64_t, kMaxParts> channels{};
  int64_t total = 0;  // channels of all parts
};

// A (1 or batch, channels) array of float32.
struct Rows {
  const float* data = nullptr;
  int64_t stride = 0;  // 0 where all samples share one row
};

}  // namespace jaxunet
