// How a weight gradient's pixels are shared out among blocks of threads, and where the sums of dy that they find on
// their way are kept.
//
// The strips of all samples stand in line; a split is a run of them. The sums of dy of a sample come from the splits
// that meet it: an array (slots, batch, features), slot 0 for the first of them. The slots that a sample does not use
// are zeros, so that all can be added blindly. Where a strip is of several samples, they count as one here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace jaxunet::cuda {

struct Shares {
  int strips, strips_of_sample, splits;  // splits <= strips; the longer ones come first

  JAXUNET_HOST_DEVICE int first(int split) const {
    const int longer = strips % splits;
    return split * (strips / splits) + (split < longer ? split : longer);
  }
  JAXUNET_HOST_DEVICE int count(int split) const { return strips / splits + (split < strips % splits ? 1 : 0); }
  JAXUNET_HOST_DEVICE int split_of(int strip) const {
    const int size = strips / splits, longer = strips % splits;
    return strip < longer * (size + 1) ? strip / (size + 1) : longer + (strip - longer * (size + 1)) / size;
  }
  JAXUNET_HOST_DEVICE int first_split(int sample) const { return split_of(sample * strips_of_sample); }
  JAXUNET_HOST_DEVICE int last_split(int sample) const { return split_of((sample + 1) * strips_of_sample - 1); }

  // No sample is met by more splits.
  int slots() const {
    const int size = strips / splits;
    return std::min(splits, (strips_of_sample - 2 + size) / size + 1);
  }
};

// Where a split's sums of dy over a sample go.
struct ShiftSums {
  float* to;  // (slots, batch, features)
  int slots, batch, features;

  JAXUNET_HOST_DEVICE void store(const Shares& shares, int split, int sample, int feature, float sum) const {
    store(split - shares.first_split(sample), split == shares.last_split(sample), sample, feature, sum);
  }
  // `last`: no later split meets the sample.
  JAXUNET_HOST_DEVICE void store(int slot, bool last, int sample, int feature, float sum) const {
    const int64_t each = static_cast<int64_t>(batch) * features;
    float* entry = to + slot * each + static_cast<int64_t>(sample) * features + feature;
    *entry = sum;
    if (!last) return;
    while (++slot < slots) *(entry += each) = 0;
  }
};

}  // namespace jaxunet::cuda
