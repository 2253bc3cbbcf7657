// The properties of a GPU that a set of kernels may use: host code without CUDA, for tests on any
// machine.
#pragma once

#include <algorithm>

#include "binding/plan.h"

namespace jaxunet {

struct Device {
  int multiprocessors = 0;
  int smem_bytes = 0;  // most shared memory per block
  // True if the Hopper kernels can run: only compute capability 9.0 has wgmma, and code with
  // clusters is compiled for it alone.
  bool hopper = false;
};

constexpr int kAdaSmemBytes = 99 * 1024;  // per block, compute capability 8.6 and 8.9

// The device, reduced to what kernels of this set may use.
constexpr Device limited(Device device, KernelSet kernels) {
  if (kernels != KernelSet::kFastest) device.hopper = false;
  if (kernels == KernelSet::kAda) device.smem_bytes = std::min(device.smem_bytes, kAdaSmemBytes);
  return device;
}

}  // namespace jaxunet
