// Fast division in a kernel by a divisor that the host knows before the launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace jaxunet::cuda {

// Divides numbers from 0 to 2^31 - 1 by a positive divisor, in a few instructions.
struct FastDivmod {
  uint32_t divisor = 1, inverse = 0xFFFFFFFF;  // inverse: 2^32 / divisor, rounded down

  FastDivmod() = default;
  explicit FastDivmod(int64_t by)
      : divisor(static_cast<uint32_t>(by)),
        inverse(static_cast<uint32_t>(std::min<int64_t>((int64_t{1} << 32) / by, 0xFFFFFFFF))) {}

  // `low` is the quotient or one less: rounding the inverse down reduces the product by less than
  // dividend / 2^32 < 1 / 2, and then the product is rounded down.
  JAXUNET_HOST_DEVICE int quotient(int dividend) const {
    const uint32_t n = static_cast<uint32_t>(dividend),
                   low = static_cast<uint32_t>((uint64_t{n} * inverse) >> 32);
    return static_cast<int>(low + (n - low * divisor >= divisor));
  }
  JAXUNET_HOST_DEVICE int remainder(int dividend, int quotient) const {
    return dividend - quotient * static_cast<int>(divisor);
  }
};

}  // namespace jaxunet::cuda
