// The helpers of the Hopper weight gradients: three warps that sum dy while the consumers multiply.
// Eight threads read a pixel's 64 features, eight each, so 12 pixels are read at a time. After a
// sample's last strip in this split, the helpers add up their sums through `scratch`.
#pragma once

#include "common/mbarrier.cuh"
#include "common/types.cuh"
#include "conv3x3/hopper/weight_gradient_share.cuh"

namespace jaxunet::cuda::weight_gradient {

// Adds a strip's dy to the eight sums of a thread. If a strip has two samples, half of the threads
// read each. Four packed samples alternate from pixel to pixel; because 12 is a multiple of 4, a
// thread reads only one of them.
template <class Block>
__device__ inline void add_dy(const Block& block, float (&totals)[8], const unsigned char* strip,
                              int thread) {
  using T = typename Block::T;
  constexpr int kPixels = kRows * kStripColumns,
                kReads = (kPixels + kHelperPixels - 1) / kHelperPixels;
  static_assert(kHelperPixels % kPairedSamples == 0 && kHelperPixels % kPackedSamples == 0,
                "a thread meets one sample only");
  const bool paired = !Block::kPacked && block.p.samples > 1;
  const int eighth = thread % 8, stride = paired ? kHelperPixels / kPairedSamples : kHelperPixels;
  const int pixels = paired ? kPixels / kPairedSamples : kPixels;
  const int half = thread / 8 >= stride, first_pixel = half * pixels + thread / 8 - half * stride;
  Eight<T> values[kReads];
#pragma unroll
  for (int n = 0; n < kReads; ++n) {
    const int pixel = first_pixel + n * stride;
    values[n].clear();
    if (n + 1 < kReads || pixel < (half + 1) * pixels) {
      values[n].load(
          reinterpret_cast<const T*>(strip + pixel * kRowBytes + ((eighth ^ pixel % 8) << 4)));
    }
  }
#pragma unroll
  for (int n = 0; n < kReads; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) totals[i] += wide(values[n].at[i]);
  }
}

// All helpers: adds up their sums for a sample (or for each sample of a strip) in a fixed order and
// stores the totals. The shortcut's blocks can use kernel.split_k too: its strips_of_sample is the
// same.
template <class Block>
__device__ inline void store_shift(const Block& block, const float (&totals)[8], int thread,
                                   int sample, int slot) {
  const auto& p = block.p;
#pragma unroll
  for (int n = 0; n < 8; ++n) block.scratch[thread / 8 * kChunk + thread % 8 * 8 + n] = totals[n];
  named_barrier_sync(1, kHelpers);
  if (thread < kChunk && block.feature + thread < p.features) {
    const bool last = (sample + 1) * p.kernel.split_k.strips_of_sample <= block.first + block.count;
    const float* from = block.scratch + thread;
    for (int n = 0; n < p.samples && sample * p.samples + n < block.shift().batch; ++n) {
      float total = 0;
      if constexpr (Block::kPacked) {
#pragma unroll
        for (int i = n; i < n + kHelperPixels; i += kPackedSamples) total += from[i * kChunk];
      } else {
#pragma unroll
        for (int i = 0; i < kHelperPixels / kPairedSamples; ++i, from += kChunk) total += *from;
        if (p.samples == 1) {
#pragma unroll
          for (int i = 0; i < kHelperPixels / kPairedSamples; ++i, from += kChunk) total += *from;
        }
      }
      block.shift().store(slot, last, sample * p.samples + n, block.feature + thread, total);
    }
  }
  named_barrier_sync(1, kHelpers);
}

// A helper thread: goes through the strips of the block's split.
template <class Block>
__device__ inline void help(const Block& block) {
  const auto& p = block.p;
  const int thread = threadIdx.x % kWarpgroup - (kWarpgroup - kHelpers);
  float totals[8];
  const unsigned char* pixels = block.first_dy();
  const int bytes = block.bytes_to_next_dy(), stages = block.ring_stages();
  Strip at = block.strip_at(block.first);
  int of_sample = -1, turn = block.turn_of(at.sample);
  // The number of splits before this one that meet the sample (split_k.h): 0 after the first
  // sample.
  int slot = block.split - block.first_split(at.sample);
  for (int i = 0, stage = 0, phase = 0; i < block.count; ++i, block.step(at)) {
    if (at.sample != of_sample) {
      if (of_sample >= 0) {
        if (turn == block.x_block) store_shift(block, totals, thread, of_sample, slot);
        slot = 0;
        if (++turn == block.x_blocks) turn = 0;
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) totals[n] = 0;
      of_sample = at.sample;
    }
    block.full[stage].wait(phase);
    if (turn == block.x_block) {
#pragma unroll
      for (int box = 0; box < Block::kStageDyBytes; box += kDyBytes)
        add_dy(block, totals, pixels + stage * bytes + box, thread);
    }
    __syncwarp();
    if (thread % 32 == 0) block.empty[stage].arrive();
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  if (turn == block.x_block) store_shift(block, totals, thread, of_sample, slot);
}

}  // namespace jaxunet::cuda::weight_gradient
