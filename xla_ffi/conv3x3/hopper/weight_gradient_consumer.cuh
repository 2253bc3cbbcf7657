// The consumers of hopper_weight_gradient_kernel. Each multiplies dy by x at a row of taps, or by
// chunks of a shortcut's input.
#pragma once

#include "conv3x3/accumulator_tile.h"
#include "conv3x3/hopper/weight_gradient_block.cuh"
#include "conv3x3/hopper/weight_gradient_mainloop.cuh"

namespace jaxunet::cuda::weight_gradient {

// Stores the accumulators of one tap or chunk, 64 features × 64 channels, as (channels, features).
// Eight lanes hold eight adjacent features: a sector of 32 bytes. Channels and features are
// multiples of eight, so each group of eight is either entirely inside or entirely outside of the
// result.
template <class Block>
__device__ inline void store(const Block& block, const float* accumulator, const Image& image,
                             const Place& place, float* to) {
  const Parameters& p = block.p;
  const int lane = threadIdx.x % 32,
            f = block.feature + 16 * (threadIdx.x % kWarpgroup / 32) + lane / 4;
  const int eights = (image.channels[place.part] - place.channel) / 8;
  const bool low = f < p.features, high = f + 8 < p.features;
  const int64_t features = p.features;
  float* at = to + (place.first + place.channel + lane % 4 * 2) * features + f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= eights) break;
    if (low) {
      at[0] = accumulator[4 * j];
      at[features] = accumulator[4 * j + 1];
    }
    if (high) {
      at[8] = accumulator[4 * j + 2];
      at[features + 8] = accumulator[4 * j + 3];
    }
    at += 8 * features;
  }
}

// Stores the accumulators of a row of taps: 32 registers for each tap.
template <class Block>
__device__ inline void epilogue(const Block& block, int tap_row, const float (&accumulator)[96]) {
  const Parameters& p = block.p;
  if (p.accumulator_tiles) {
    store_entries<AccumulatorTile>(
        p.partials + (static_cast<int64_t>(block.split) * p.kernel.tiles + block.tile) *
                         AccumulatorTile::kEntries,
        tap_row, accumulator);
    return;
  }
  const Place place(p.x, block.x_block);
#pragma unroll
  for (int tap = 0; tap < 3; ++tap) {
    store(block, accumulator + 32 * tap, p.x, place,
          p.partials +
              (static_cast<int64_t>(block.split) * 9 + 3 * tap_row + tap) * p.x.total * p.features);
  }
}

// A consumer of a block of the shortcut's gradient: multiplies kCount projected chunks, starting
// with chunk `first` of the block.
template <int kCount, class Block>
__device__ inline void consume_chunks(const Block& block, int first) {
  using T = typename Block::T;
  const Parameters& p = block.p;
  const int bytes = block.stage_bytes(), stages = block.stages(), lane = threadIdx.x % 32;
  float accumulator[32 * kCount];
#pragma unroll
  for (int i = 0; i < 32 * kCount; ++i) accumulator[i] = 0;
  int held = -1;
  for (int i = 0, stage = 0, phase = 0; i < block.count; ++i) {
    block.full[stage].wait(phase);
    const uint32_t from = shared_address(block.x + stage * bytes);
    // As in `consume`, but B is the chunks: the next 64 columns are the next chunk.
    const uint64_t left = smem_descriptor(from, 8 * kRowBytes);
    const uint64_t right = smem_descriptor(from + (1 + first) * kDyBytes, 8 * kRowBytes, kDyBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRows / 2; ++k) {  // 16 pixels
      Wgmma<T, true, true, kChunk * kCount>::run(accumulator, advance(left, 16 * kRowBytes * k),
                                                 advance(right, 16 * kRowBytes * k), true);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (held >= 0 && lane == 0) block.empty[held].arrive();
    held = stage;
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  wgmma_wait<0>();
  fence_accumulator(accumulator);
  float* to =
      p.shortcut_partials + static_cast<int64_t>(block.split) * p.projected.total * p.features;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    store(block, accumulator + 32 * n, p.projected,
          Place(p.projected, block.x_block * p.block_chunks + first + n), to);
  }
}

// Multiplies two projected chunks, or only the last one if their number is odd.
template <class Block>
__device__ inline void consume_projected(const Block& block, int consumer) {
  const int first = kChunksOfConsumer * consumer, rest = block.chunks - first;
  if (rest >= kChunksOfConsumer) {
    consume_chunks<kChunksOfConsumer>(block, first);
  } else if (rest > 0) {
    consume_chunks<1>(block, first);
  }
}

}  // namespace jaxunet::cuda::weight_gradient
