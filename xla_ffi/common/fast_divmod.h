// Division in a kernel by what the host knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace jaxunet::cuda {

// Division by a number that is known before the launch: of a number that is not negative, in a few instructions.
struct FastDivmod {
  uint32_t by = 1, inverse = 0xFFFFFFFF;

  FastDivmod() = default;
  explicit FastDivmod(int64_t by_)
      : by(static_cast<uint32_t>(by_)),
        inverse(static_cast<uint32_t>(std::min<int64_t>((int64_t{1} << 32) / by_, 0xFFFFFFFF))) {}

  // The inverse is rounded down, so that the first estimate is right or one too small.
  JAXUNET_HOST_DEVICE int quotient(int dividend) const {
    const uint32_t n = static_cast<uint32_t>(dividend), low = static_cast<uint32_t>((uint64_t{n} * inverse) >> 32);
    return static_cast<int>(low + (n - low * by >= by));
  }
};

}  // namespace jaxunet::cuda
