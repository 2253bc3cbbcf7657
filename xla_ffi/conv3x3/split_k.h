// Split-K of the weight gradients: K runs over pixels, and the strips of pixels (rectangles of one
// size) are divided among splits, each computed by its own blocks. Their partial results are added
// afterwards (split_k_reduce.cu).
//
// The strips of all samples form one sequence, and a split is a contiguous part of it. A split
// meets a sample if it contains strips of that sample. Some blocks also compute a partial sum of dy
// for each sample that their split meets. These sums go to an array (slots, batch, features): slot
// 0 for the first split that meets the sample, slot 1 for the next, and so on. Unused slots are
// zeros, so that the reduction can add all of them.
//
// If a strip holds the same pixels of several samples, "sample" means that group of samples.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace jaxunet::cuda {

struct SplitK {
  // splits <= strips. Splits differ by at most one strip; the longer ones come first.
  int strips, strips_of_sample, splits;

  // The first strip of a split, and the number of its strips.
  JAXUNET_HOST_DEVICE int first(int split) const {
    const int longer = strips % splits;
    return split * (strips / splits) + (split < longer ? split : longer);
  }
  JAXUNET_HOST_DEVICE int count(int split) const {
    return strips / splits + (split < strips % splits ? 1 : 0);
  }
  JAXUNET_HOST_DEVICE int split_of(int strip) const {
    const int size = strips / splits, longer = strips % splits;
    return strip < longer * (size + 1) ? strip / (size + 1)
                                       : longer + (strip - longer * (size + 1)) / size;
  }
  // The first and the last split that meet a sample.
  JAXUNET_HOST_DEVICE int first_split(int sample) const {
    return split_of(sample * strips_of_sample);
  }
  JAXUNET_HOST_DEVICE int last_split(int sample) const {
    return split_of((sample + 1) * strips_of_sample - 1);
  }

  // Most splits that meet one sample. A split has at least `size` strips, so n consecutive strips
  // cross at most ceil((n - 1) / size) boundaries between splits.
  int slots() const {
    const int size = strips / splits;
    return std::min(splits, (strips_of_sample - 2 + size) / size + 1);
  }
};

// Partial sums of dy over pixels. Their sum is the gradient of the shift.
struct ShiftPartials {
  float* to;  // (slots, batch, features)
  int slots, batch, features;

  // Stores one split's sum over one sample.
  JAXUNET_HOST_DEVICE void store(const SplitK& split_k, int split, int sample, int feature,
                                 float sum) const {
    store(split - split_k.first_split(sample), split == split_k.last_split(sample), sample, feature,
          sum);
  }
  // `last`: no later split meets the sample; the remaining slots become zeros.
  JAXUNET_HOST_DEVICE void store(int slot, bool last, int sample, int feature, float sum) const {
    const int64_t each = static_cast<int64_t>(batch) * features;
    float* entry = to + slot * each + static_cast<int64_t>(sample) * features + feature;
    *entry = sum;
    if (!last) return;
    while (++slot < slots) *(entry += each) = 0;
  }
};

}  // namespace jaxunet::cuda
