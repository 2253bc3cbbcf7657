// The mainloop of the Hopper weight gradients: multiplies dy by x at adjacent taps.
#pragma once

#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"
#include "conv3x3/hopper/weight_gradient_share.cuh"

namespace jaxunet::cuda::weight_gradient {

// Stores one consumer thread's accumulators as entries of a tile of partial results.
template <class Tile>
__device__ inline void store_entries(float* tile, int consumer, const float* accumulator) {
  float* to = tile + Tile::entry(consumer, 0, threadIdx.x % kWarpgroup);
#pragma unroll
  for (int n = 0; n < Tile::kFours; ++n) {
    const float* four = accumulator + 4 * n;
    *reinterpret_cast<float4*>(to + Tile::entry(0, n, 0)) = {four[0], four[1], four[2], four[3]};
  }
}

// A consumer of the kernel's gradient: kTaps taps of a row, with 32 registers per tap, which the
// block's `epilogue` stores.
template <class Block>
__device__ inline void consume(const Block& block, int tap_row) {
  using T = typename Block::T;
  const auto& p = block.p;
  const int lane = threadIdx.x % 32;
  float accumulator[32 * Block::kTaps];
#pragma unroll
  for (int i = 0; i < 32 * Block::kTaps; ++i) accumulator[i] = 0;
  constexpr int kStepsOfSample = kRows / 2 / kPairedSamples;  // 16 pixels each, in a paired sample
  // Bytes of the halo between two samples: the last row of the first and the first row of the
  // second.
  const int between = Block::kPacked || p.samples == 1 ? 0 : 2 * Block::kBelow;
  int held = -1;  // the stage that the last wgmma read, not yet released
  for (int i = 0; i < block.count; ++i) {
    const int stage = i % Block::kStages;
    block.full[stage].wait(i / Block::kStages % 2);
    // A = dyᵀ, 64 features × pixels. B = x, pixels × the taps of 64 channels: `leading` is one
    // pixel, so that the next 64 columns are the tap to the right.
    const uint64_t left =
        smem_descriptor(shared_address(block.dy + stage * Block::kStageDyBytes), 8 * kRowBytes);
    const uint64_t right =
        smem_descriptor(shared_address(block.x + stage * Block::kXBytes) + tap_row * Block::kBelow,
                        Block::kEight, Block::kRight);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRows / 2; ++k) {  // 16 pixels
      Wgmma<T, true, true, kChunk * Block::kTaps>::run(
          accumulator, advance(left, 16 * kRowBytes * k),
          advance(right, Block::kRowsOfStep * Block::kBelow * k + k / kStepsOfSample * between),
          true);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (held >= 0 && lane == 0) block.empty[held].arrive();
    held = stage;
  }
  wgmma_wait<0>();
  fence_accumulator(accumulator);
  epilogue(block, tap_row, accumulator);
}

}  // namespace jaxunet::cuda::weight_gradient
