// The consumers of hopper_weight_gradient_kernel. Each multiplies dy by x at a row of taps, or by
// chunks of a shortcut's input.
#pragma once

#include "common/types.cuh"
#include "conv3x3/accumulator_tile.h"
#include "conv3x3/hopper/weight_gradient_block.cuh"
#include "conv3x3/hopper/weight_gradient_mainloop.cuh"

namespace jaxunet::cuda::weight_gradient {

// Where a thread stores the accumulators of one tap or chunk, 64 features × 64 channels, as
// (channels, features). Channels and features are multiples of eight, so each group of eight is
// either entirely inside or entirely outside of the result.
struct Entries {
  int64_t features;
  int64_t at;      // of its first channel and feature
  int eights;      // of channels; four accumulators each: see AccumulatorTile
  bool low, high;  // its first feature is inside, and the one eight further on

  template <class Block>
  __device__ Entries(const Block& block, const Image& image, const Place& place)
      : features(block.p.features) {
    const int lane = threadIdx.x % 32,
              f = block.feature + 16 * (threadIdx.x % kWarpgroup / 32) + lane / 4;
    at = (place.first + place.channel + lane % 4 * 2) * features + f;
    eights = (image.channels[place.part] - place.channel) / 8;
    low = f < features;
    high = f + 8 < features;
  }
};

// Stores float32: eight lanes have eight adjacent features, a sector of 32 bytes.
__device__ inline void store_wide(const Entries& entries, const float* accumulator, float* to) {
  to += entries.at;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= entries.eights) break;
    if (entries.low) {
      to[0] = accumulator[4 * j];
      to[entries.features] = accumulator[4 * j + 1];
    }
    if (entries.high) {
      to[8] = accumulator[4 * j + 2];
      to[entries.features + 8] = accumulator[4 * j + 3];
    }
    to += 8 * entries.features;
  }
}

// Stores a 16-bit type. Two lanes with adjacent features exchange accumulators: then one has both
// features of the first channel, the other those of the second.
template <class T>
__device__ inline void store_narrow(const Entries& entries, const float* accumulator, T* to) {
  const bool odd = threadIdx.x & 4;
  to += entries.at + (odd ? entries.features - 1 : 0);
  const auto put = [odd](T* at, float first, float second) {
    const float got = __shfl_xor_sync(~0u, odd ? first : second, 4);
    *reinterpret_cast<AlignedArray<T, 2>*>(at) = {narrow<T>(odd ? got : first),
                                                  narrow<T>(odd ? second : got)};
  };
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= entries.eights) break;
    if (entries.low) put(to, accumulator[4 * j], accumulator[4 * j + 1]);
    if (entries.high) put(to + 8, accumulator[4 * j + 2], accumulator[4 * j + 3]);
    to += 8 * entries.features;
  }
}

// Stores the accumulators of one tap or chunk, from entry `first` of the result on.
template <class Block>
__device__ inline void store(const Entries& entries, const float* accumulator, const Result& to,
                             int64_t first) {
  using T = typename Block::T;
  if (to.type == Type::kFloat32) {
    store_wide(entries, accumulator, static_cast<float*>(to.data) + first);
  } else {
    store_narrow(entries, accumulator, static_cast<T*>(to.data) + first);
  }
}

// Stores the accumulators of a row of taps: 32 registers for each tap.
template <class Block>
__device__ inline void epilogue(const Block& block, int tap_row, const float (&accumulator)[96]) {
  const Member& p = block.p;
  if (p.accumulator_tiles) {
    store_entries<AccumulatorTile>(
        static_cast<float*>(p.partials.data) +
            (static_cast<int64_t>(block.split) * p.kernel.tiles + block.tile) *
                AccumulatorTile::kEntries,
        tap_row, accumulator);
    return;
  }
  const Entries entries(block, p.x, Place(p.x, block.x_block));
#pragma unroll
  for (int tap = 0; tap < 3; ++tap) {
    store<Block>(
        entries, accumulator + 32 * tap, p.partials,
        (static_cast<int64_t>(block.split) * 9 + 3 * tap_row + tap) * p.x.total * p.features);
  }
}

// A consumer of a block of the shortcut's gradient: multiplies kCount projected chunks, starting
// with chunk `first` of the block.
template <int kCount, class Block>
__device__ inline void consume_chunks(const Block& block, int first) {
  using T = typename Block::T;
  const Member& p = block.p;
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
  const int64_t begin = static_cast<int64_t>(block.split) * p.projected.total * p.features;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const Place place(p.projected, block.x_block * p.block_chunks + first + n);
    store<Block>(Entries(block, p.projected, place), accumulator + 32 * n, p.shortcut_partials,
                 begin);
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
