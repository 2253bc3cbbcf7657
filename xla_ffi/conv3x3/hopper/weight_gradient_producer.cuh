// The producer of hopper_weight_gradient_kernel: one thread that fills the ring by TMA.
#pragma once

#include "conv3x3/hopper/weight_gradient_block.cuh"

namespace jaxunet::cuda::weight_gradient {

// Kernel's gradient: loads dy and haloed x. Packed boxes, and boxes of fewer than kRows rows, leave
// part of a stage unused.
template <class Block>
__device__ inline void produce(const Block& block) {
  const Member& p = block.p;
  const Place place(p.x, block.x_block);
  const int bytes = Block::loaded_x_bytes(p.samples) + kDyBytes;
  Strip at = block.strip_at(block.first);
  for (int i = 0; i < block.count; ++i, block.step(at)) {
    const int stage = i % Block::kStages;
    const Strip from = block.for_tma(at);
    block.empty[stage].wait(i / Block::kStages % 2 ^ 1);  // returns at once in the first round
    block.full[stage].arrive_expect(bytes);
    load_strip<Block::kPacked>(block.dy + stage * kDyBytes, block.map(p.dy), &block.full[stage],
                               block.feature, from, 0);
    load_strip<Block::kPacked>(block.x + stage * Block::kXBytes, block.map(p.x, place.part),
                               &block.full[stage], place.channel, from, 1);
  }
}

// Shortcut's gradient: loads dy and the block's projected chunks.
template <class Block>
__device__ inline void produce_projected(const Block& block) {
  const Member& p = block.p;
  const Place begin(p.projected, block.x_block * p.block_chunks);
  const int bytes = block.stage_bytes(), stages = block.stages();
  Strip at = block.strip_at(block.first);
  for (int i = 0, stage = 0, phase = 1; i < block.count; ++i, block.step(at)) {
    block.empty[stage].wait(phase);  // returns at once in the first round
    block.full[stage].arrive_expect(bytes);
    const Strip from = block.for_tma(at);
    unsigned char* to = block.x + stage * bytes;
    load_strip<Block::kPacked>(to, block.map(p.dy), &block.full[stage], block.feature, from, 0);
    int part = begin.part, channel = begin.channel;
    for (int n = 0; n < block.chunks; ++n) {
      while (channel >= p.projected.channels[part]) {
        channel = 0;
        ++part;
      }
      to += kDyBytes;
      load_strip<Block::kPacked>(to, block.map(p.projected, part), &block.full[stage], channel,
                                 from, 0);
      channel += kChunk;
    }
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

}  // namespace jaxunet::cuda::weight_gradient
