// The checked operands of a call, which the readers pass to the kernels: plain data, the same for
// CPU and CUDA. It does not include ffi.h, which nvcc compiles slowly.
#pragma once

#include <array>
#include <cstdint>

namespace jaxunet {

enum class Type { kFloat32, kFloat16, kBfloat16 };

// The kernels that a call may run, its attribute `kernels` (jaxunet/runtime/device.py).
enum class KernelSet {
  kFastest,   // no attribute: the fastest for this GPU
  kPortable,  // "portable": none of those for Hopper
  kAda,       // "ada": the same, within the shared memory of a block of an Ada GPU
};

constexpr int kMaxParts = 4;  // arrays whose channels one tensor joins

// An NHWC tensor whose channels are those of one or more arrays, in order.
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
