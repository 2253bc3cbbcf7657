// The producer of hopper_forward_kernel, and the warpgroups that activate the loaded strips in
// place.
#pragma once

#include "conv3x3/activation.cuh"
#include "conv3x3/hopper/forward_block.cuh"

namespace jaxunet::cuda::forward {

// One thread: fills both rings by TMA, in the order in which the consumers use them.
template <class Block>
__device__ inline void produce(const Block& block) {
  using Traits = typename Block::Traits;
  const auto& p = block.p;
  // The slot of the strip rings and the stage of the weight ring to fill next.
  int slot = 0, slot_phase = 0, stage = 0, stage_phase = 0;
  bool first_tile = true;
  Strip at[Traits::kConsumers];  // the strips of a tile

  // Loads one chunk of each consumer's strip.
  const auto load_strips = [&](const CUtensorMap* map, int channel) {
#pragma unroll
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      const int n = consumer * kStripStages + slot;
      block.strip_empty[n].wait(slot_phase ^ 1);  // returns at once in the first round
      block.strip_full[n].arrive_expect(Traits::kBoxBytes);
      load_strip<Traits::kPacked>(block.strip(consumer, slot), map, &block.strip_full[n], channel,
                                  at[consumer], 1);
    }
    slot = (slot + 1) % kStripStages;
    slot_phase ^= slot == 0;
  };
  // Loads one chunk's weights for `taps` taps. A row of shared memory is 64 contiguous weights.
  // With a flipped kernel these are 64 channels, and one box holds the whole stage; otherwise they
  // are 64 features, with one box for each 64 features of the tile.
  const auto load_weights = [&](const CUtensorMap* map, int channel, int feature, int tap,
                                int taps) {
    if (p.schedule.weights_resident && !first_tile) return;
    block.weights_empty[stage].wait(stage_phase ^ 1);
    block.weights_full[stage].arrive_expect(taps * Traits::kFeatures * kRowBytes);
    unsigned char* to = block.weights + stage * Traits::kStageBytes;
    if (!Block::kFlipped) {
      for (int n = 0; n < Block::kFeatureChunks; ++n) {
        tma_load(to + n * Traits::kTaps * kChunk * kRowBytes, map, &block.weights_full[stage],
                 feature + n * kChunk, channel, tap);
      }
    } else {
      tma_load(to, map, &block.weights_full[stage], channel, feature, tap);
    }
    if (++stage == p.schedule.stages) {
      stage = 0;
      stage_phase ^= 1;
    }
  };

  const bool draws = block.draws();
  unsigned drawn = 0;  // tiles
  int tile = static_cast<int>(blockIdx.x);
  while ((tile = uniform(tile, 1u)) < p.schedule.tiles) {
    const unsigned next = draws ? block.draw() : 0;  // early, because it takes its time
    const auto [first_strip, feature] = block.place_of(tile);
#pragma unroll
    for (int i = 0; i < Traits::kConsumers; ++i) at[i] = block.strip_at(first_strip + i);
    int channel = 0;  // counted over all parts
    for (int part = 0; part < p.x_parts; ++part) {
      for (int c = 0; c < p.x_channels[part]; c += kChunk) {
        load_strips(&p.maps.x[part], c);
        for (int n = 0; n < Block::kLoads; ++n) {
          if constexpr (Traits::kPhases) {
            const int phase = block.image_phase(feature, (channel + c) / kChunk);
            load_weights(&p.maps.kernel, c, block.channel_of(feature),
                         phase * Traits::kKernelTaps + n * Traits::kTaps, Traits::kTaps);
          } else {
            load_weights(&p.maps.kernel, channel + c, feature, n * Traits::kTaps, Traits::kTaps);
          }
        }
      }
      channel += p.x_channels[part];
    }
    channel = 0;
    for (int part = 0; part < p.projected_parts; ++part) {
      for (int c = 0; c < p.projected_channels[part]; c += kChunk) {
        load_strips(&p.maps.projected[part], c);
        load_weights(&p.maps.shortcut, channel + c, feature, 0, 1);
      }
      channel += p.projected_channels[part];
    }
    first_tile = false;
    tile = draws ? block.publish(next, drawn++) : tile + static_cast<int>(gridDim.x);
  }
}

// One thread of a warpgroup: applies SiLU(a · x + b) in place in shared memory, once for the nine
// taps that read the result. Of each pixel's 64 channels, the thread takes the eight from 8 ·
// eighth on, whose a and b `coefficients` holds.
template <class T, int kRows>
__device__ inline void activate_strip(unsigned char* pixels, const Strip& at, int height, int width,
                                      int thread, const ActivationCoefficients& coefficients) {
  const int eighth = thread % 8;
#pragma unroll 4
  for (int pixel = thread / 8; pixel < (kRows + 2) * kHaloColumns; pixel += kWarpgroup / 8) {
    const int down = pixel / kHaloColumns, y = at.row - 1 + down,
              x = at.column - 1 + pixel - down * kHaloColumns;
    auto* here = reinterpret_cast<T*>(pixels + pixel * kRowBytes + ((eighth ^ pixel % 8) << 4));
    const bool inside = y >= 0 && y < height && x >= 0 && x < width;
    Eight<T> values;
    values.load(here);
    coefficients.apply(values, inside);
    values.store(here);
  }
}

// A warpgroup: activates the strips of one consumer. It hands a shortcut's input on unchanged.
template <class Block>
__device__ inline void activate(const Block& block, int consumer) {
  using Traits = typename Block::Traits;
  const auto& p = block.p;
  const int thread = threadIdx.x % kWarpgroup,
            eighth = thread % 8;  // which eight of a pixel's 64 channels
  int slot = 0, phase = 0;
  Tiles<Block> tiles(block);
  for (int tile = static_cast<int>(blockIdx.x); tile < p.schedule.tiles; tile = tiles.after(tile)) {
    const Strip at = block.strip_at(block.place_of(tile).first_strip + consumer);
    const int64_t sample = at.sample < p.schedule.batch ? at.sample : p.schedule.batch - 1;
    int channel = 0;
    for (int part = 0; part < p.x_parts; ++part) {
      for (int c = eighth * 8; c < p.x_channels[part] + eighth * 8; c += kChunk) {
        const ActivationCoefficients coefficients(p.a, p.b, sample, channel + c,
                                                  c < p.x_channels[part]);
        const int n = consumer * kStripStages + slot;
        block.strip_full[n].wait(phase);
        activate_strip<typename Block::T, Traits::kRows>(block.strip(consumer, slot), at,
                                                         p.schedule.height, p.schedule.width,
                                                         thread, coefficients);
        fence_async_proxy();
        block.strip_ready[n].arrive();
        slot = (slot + 1) % kStripStages;
        phase ^= slot == 0;
      }
      channel += p.x_channels[part];
    }
    for (int chunk = 0; chunk < p.schedule.shortcut_chunks; ++chunk) {
      block.strip_full[consumer * kStripStages + slot].wait(phase);
      block.strip_ready[consumer * kStripStages + slot].arrive();
      slot = (slot + 1) % kStripStages;
      phase ^= slot == 0;
    }
  }
}

}  // namespace jaxunet::cuda::forward
