// Division in a kernel by a divisor that the host knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace jaxunet::cuda {

// Divides numbers that are not negative by a positive divisor, in a few instructions.
struct FastDivmod {
  uint32_t divisor = 1, inverse = 0xFFFFFFFF;

  FastDivmod() = default;
  explicit FastDivmod(int64_t by)
      : divisor(static_cast<uint32_t>(by)),
        inverse(static_cast<uint32_t>(std::min<int64_t>((int64_t{1} << 32) / by, 0xFFFFFFFF))) {}

  // The inverse is rounded down, so the estimate is right or one too small.
  JAXUNET_HOST_DEVICE int quotient(int dividend) const {
    const uint32_t n = static_cast<uint32_t>(dividend),
                   low = static_cast<uint32_t>((uint64_t{n} * inverse) >> 32);
    return static_cast<int>(low + (n - low * divisor >= divisor));
  }
};

}  // namespace jaxunet::cuda
