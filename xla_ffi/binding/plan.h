// The checked operands of a call, which the readers pass to the kernels. They are plain data, the
// same for CPU and CUDA. It does not include ffi.h, which nvcc compiles slowly.
#pragma once

#include <array>
#include <cstdint>

namespace jaxunet {

enum class Type { kFloat32, kFloat16, kBfloat16 };

// The kernels that a call may run, from its attribute `kernels` (jaxunet/runtime/device.py).
enum class KernelSet {
  kFastest,   // no attribute: the fastest for this GPU
  kPortable,  // "portable": no Hopper kernels
  kAda,       // "ada": portable, within an Ada GPU's shared memory per block
};

constexpr int kMaxParts = 4;  // most arrays that form one tensor

// An NHWC tensor given as one or more arrays, joined along their channels.
struct Parts {
  int count = 0;
  std::array<void*, kMaxParts> data{};
  std::array<int64_t, kMaxParts> channels{};
  int64_t total = 0;  // channels of all parts
};

// A float32 array of shape (1 or batch, channels).
struct Rows {
  const float* data = nullptr;
  int64_t stride = 0;  // 0: all samples share one row
};

}  // namespace jaxunet
