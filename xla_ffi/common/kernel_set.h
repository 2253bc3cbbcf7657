// The properties of a GPU that a set of kernels may use: host code without CUDA, for tests on any
// machine.
#pragma once

#include <algorithm>

#include "binding/plan.h"

namespace jaxunet {

struct Device {
  int multiprocessors = 0;
  int smem_bytes = 0;  // shared memory that a block may have
  // True if the kernels for Hopper run: wgmma exists in compute capability 9.0 alone, and builds
  // have code with clusters for no other.
  bool hopper = false;
};

constexpr int kAdaSmemBytes = 99 * 1024;  // of a block, in compute capability 8.6 and 8.9

// The device as kernels of this set may use it.
constexpr Device limited(Device device, KernelSet kernels) {
  if (kernels != KernelSet::kFastest) device.hopper = false;
  if (kernels == KernelSet::kAda) device.smem_bytes = std::min(device.smem_bytes, kAdaSmemBytes);
  return device;
}

}  // namespace jaxunet
