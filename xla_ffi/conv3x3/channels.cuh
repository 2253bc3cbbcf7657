// An image in parts (Parts in binding/plan.h): arrays joined along their channels, in the form that
// the kernels of portable/ and small_channels/ read.
#pragma once

#include "common/types.cuh"
#include "conv3x3/plan.h"

namespace jaxunet::cuda {

struct Channels {
  const void* data[kMaxParts];
  int widths[kMaxParts];  // channels of each part
  int count, total;       // number of parts; channels of all parts

  // The address of `channel` at pixel `row`, counted over the whole batch; channel < total.
  template <class T>
  __device__ const T* at(int64_t row, int channel) const {
#pragma unroll
    for (int i = 0; i < kMaxParts - 1; ++i) {
      if (i + 1 >= count || channel < widths[i])
        return static_cast<const T*>(data[i]) + row * widths[i] + channel;
      channel -= widths[i];
    }
    return static_cast<const T*>(data[kMaxParts - 1]) + row * widths[kMaxParts - 1] + channel;
  }
};

inline Channels channels_of(const Parts& parts) {
  Channels all{};
  all.count = parts.count;
  all.total = static_cast<int>(parts.total);
  for (int i = 0; i < parts.count; ++i) {
    all.data[i] = parts.data[i];
    all.widths[i] = static_cast<int>(parts.channels[i]);
  }
  return all;
}

}  // namespace jaxunet::cuda
