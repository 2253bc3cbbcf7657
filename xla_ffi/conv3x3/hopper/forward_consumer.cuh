// A consumer warpgroup of hopper_forward_kernel: for each tile, the mainloop over one strip, then
// the epilogue.
#pragma once

#include "common/wgmma.cuh"
#include "conv3x3/hopper/forward_epilogue.cuh"
#include "conv3x3/hopper/wide_epilogue.cuh"

namespace jaxunet::cuda::forward {

// Issues the wgmmas of one tap of 64 channels. Without `add`, those of a transposed tile overwrite
// the accumulator; any other accumulator starts with the shift. `strip` and `weights` are
// shared-memory addresses. The accumulator is pixels × features, or features × pixels if
// kTransposed, which exchanges wgmma's operands. Pixels are always K-major, because their channels
// are contiguous; so are the weights of a flipped kernel.
template <class Block>
__device__ inline void multiply_tap(typename Block::Accumulator& accumulator, uint32_t strip,
                                    int tap, uint32_t weights, bool add) {
  using T = typename Block::T;
  using Traits = typename Block::Traits;
  constexpr int kN = Traits::kWgmmaN;
  const uint64_t pixels = smem_descriptor(strip + Traits::tap_row(tap) * kRowBytes,
                                          Traits::kGroupStrideRows * kRowBytes);
  const uint64_t k_major = smem_descriptor(weights, 8 * kRowBytes),
                 mn_major =
                     smem_descriptor(weights, 8 * kRowBytes, Traits::kTaps * kChunk * kRowBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // 16 channels
    const uint64_t x = advance(pixels, 32 * k);
    if (!Block::kFlipped) {
      const uint64_t w = advance(mn_major, 16 * kRowBytes * k);
      if constexpr (Traits::kTransposed) {
        Wgmma<T, true, false, kN>::run(accumulator, w, x, add || k > 0);
      } else {
        Wgmma<T, false, true, kN>::run(accumulator, x, w, true);
      }
    } else {
      const uint64_t w = advance(k_major, 32 * k);
      if constexpr (Traits::kTransposed) {
        Wgmma<T, false, false, kN>::run(accumulator, w, x, add || k > 0);
      } else {
        Wgmma<T, false, false, kN>::run(accumulator, x, w, true);
      }
    }
  }
}

// Bytes from the pixels that phase (0, 0) reads at a tap to the pixels that another phase
// (phases.h) reads.
template <class Block>
__device__ inline int phase_bytes(int image_phase) {
  using Traits = typename Block::Traits;
  const int rows =
      (image_phase / 2 * Traits::kHaloColumns + image_phase % 2) * Traits::kSamples * kRowBytes;
  return Block::kFlipped ? -rows : rows;
}

// A consumer warpgroup: one strip of every tile. One long function, because splitting it changes
// the code that ptxas generates, and its speed would have to be measured again.
template <class Block>
__device__ inline void consume(const Block& block, int consumer) {
  using Traits = typename Block::Traits;
  constexpr int kCentre = 4;  // tap
  const auto& p = block.p;
  const int thread = threadIdx.x % kWarpgroup;
  const bool ping_pong = p.schedule.weights_resident && Traits::kConsumers == 2;
  const bool elected = thread % 32 == 0;  // arrives for its warp
  Barrier* ready =
      (Traits::kActivated ? block.strip_ready : block.strip_full) + consumer * kStripStages;
  // The next slot of the strip ring and stage of the weight ring, and the parities of their full
  // barriers to wait for. tile_phase: the parity of residual_full.
  int slot = 0, slot_phase = 0, stage = 0, stage_phase = 0, tile_phase = 0;
  if (ping_pong && consumer == 1) block.turn[0].arrive();
  int turn_phase = 0;

  Tiles<Block> tiles(block);
  for (int tile = static_cast<int>(blockIdx.x); tile < p.schedule.tiles;) {
    const auto [first_strip, feature] = block.place_of(tile);
    const Strip at = block.strip_at(first_strip + consumer);
    unsigned char* output = block.outputs + consumer * Traits::kOutputBytes;
    if (p.residual && thread == 0) load_residual(block, consumer, at, feature, output);
    typename Block::Accumulator accumulator;
    RowShifts<Traits> shifts;
    if constexpr (Traits::kTransposed) {
      shifts = read_row_shifts(block, at, block.channel_of(feature));
    } else {
      start_with_shift(block, accumulator, at, block.channel_of(feature));
    }
    if (p.schedule.weights_resident) stage = stage_phase = 0;

    // The slot and stage that the last wgmmas read. They are released one step late, after the next
    // wgmmas have been issued, so that the tensor cores always have queued work.
    int held_slot = -1, held_stage = -1;
    const auto release_stage = [&](int next) {
      if (held_stage >= 0 && elected && !p.schedule.weights_resident)
        block.weights_empty[held_stage].arrive();
      held_stage = next;
    };
    const auto release_slot = [&](int next) {
      if (held_slot >= 0 && elected)
        block.strip_empty[consumer * kStripStages + held_slot].arrive();
      held_slot = next;
    };
    const auto next_stage = [&] {
      if (++stage == p.schedule.stages) {
        stage = 0;
        stage_phase ^= 1;
      }
    };
    // Waits for the strip, and for this consumer's turn. Returns the strip's address.
    const auto begin_chunk = [&] {
      ready[slot].wait(slot_phase);
      if (ping_pong) {
        block.turn[consumer].wait(turn_phase);
        turn_phase ^= 1;
      }
      return shared_address(block.strip(consumer, slot));
    };
    const auto end_chunk = [&] {
      if (ping_pong) block.turn[consumer ^ 1].arrive();
      slot = (slot + 1) % kStripStages;
      slot_phase ^= slot == 0;
    };

    for (int chunk = 0; chunk < p.schedule.chunks; ++chunk) {
      uint32_t pixels = begin_chunk();
      if constexpr (Traits::kPhases)
        pixels += phase_bytes<Block>(block.image_phase(feature, chunk));
#pragma unroll
      for (int n = 0; n < Block::kLoads; ++n) {
        block.weights_full[stage].wait(stage_phase);
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < Traits::kTaps; ++t) {
          const int tap = Traits::kernel_tap(n * Traits::kTaps + t);
          const uint32_t weights = shared_address(block.weights) + stage * Traits::kStageBytes +
                                   t * (Block::kFlipped ? Traits::kFeatures : kChunk) * kRowBytes;
          multiply_tap<Block>(accumulator, pixels, Block::kFlipped ? 8 - tap : tap, weights,
                              chunk > 0 || tap > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (n == 0) release_slot(slot);
        release_stage(stage);
        next_stage();
      }
      end_chunk();
    }
    for (int chunk = 0; chunk < p.schedule.shortcut_chunks; ++chunk) {
      const uint32_t pixels = begin_chunk();
      block.weights_full[stage].wait(stage_phase);
      wgmma_fence();
      multiply_tap<Block>(accumulator, pixels, kCentre,
                          shared_address(block.weights) + stage * Traits::kStageBytes,
                          p.schedule.chunks > 0 || chunk > 0);
      wgmma_commit();
      wgmma_wait<1>();
      release_slot(slot);
      release_stage(stage);
      next_stage();
      end_chunk();
    }
    tile = tiles.after(tile);  // known by now, so that the next tile does not wait for it
    wgmma_wait<0>();
    fence_accumulator(accumulator);
    release_slot(-1);
    release_stage(-1);
    if constexpr (Traits::kWide) {
      wide_epilogue(block, accumulator, shifts, at, feature);
    } else {
      block.epilogue(accumulator, shifts, consumer, at, feature, output, tile_phase);
    }
    tile_phase ^= 1;
  }
  if (thread == 0) tma_store_wait_read();
}

}  // namespace jaxunet::cuda::forward
