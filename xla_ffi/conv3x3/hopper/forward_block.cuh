// Shared by all warpgroups of a block of hopper_forward_kernel: the shared-memory map, the
// barriers, the order of its tiles. forward.cuh describes them.
#pragma once

#include <type_traits>

#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "conv3x3/hopper/forward.h"
#include "conv3x3/hopper/strip.cuh"

namespace jaxunet::cuda::forward {

// The number of draws of a launch, at the launch's own counter. Launches that run at the same time
// have different counters (forward.cu). Zero before and after a launch, because the last draw sets
// it back.
static __device__ unsigned tile_counters[kTileCounters];

constexpr int kTileRing = 4;  // tiles that the producer has drawn

// Returns `value`, which is the same in all threads of `mask`, which are all that run here. The
// result is in a uniform register, so that ptxas keeps the state of loops over tiles in these.
__device__ inline int uniform(int value, unsigned mask) { return __reduce_max_sync(mask, value); }

// The shifts of a thread's two accumulator rows (output channels) in a transposed tile; packed, of
// the samples of its two columns per group of eight: at[row][column].
template <class Traits>
struct RowShifts {
  static constexpr int kColumns = Traits::kPacked ? 2 : 1;
  float at[2][kColumns];
};

template <class T_, class Traits_, bool kFlipped_>
struct Block {
  using T = T_;
  using Traits = Traits_;
  static constexpr bool kFlipped = kFlipped_;
  static constexpr int kConsumers = Traits::kConsumers, kTaps = Traits::kTaps;
  static constexpr int kLoads =
      Traits::kKernelTaps / kTaps;  // weight stages per chunk of 64 channels
  static constexpr int kFeatureChunks = Traits::kFeatures / kChunk;
  static constexpr int kMaxStages = Traits::kTile.max_stages();  // of the weight ring
  static constexpr int kBarriers = kConsumers * (3 * kStripStages + 1) + 2 + 2 * kMaxStages +
                                   kTileRing;  // in the order of the constructor
  static_assert(kBarriers * sizeof(Barrier) + kTileRing * sizeof(int) <= kBarrierBytes,
                "room for all barriers and the drawn tiles");
  using Accumulator = float[Traits::kWgmmaN / 2];  // one thread's part
  // The kernel's parameter.
  using Given = std::conditional_t<Traits::kWide, WideParameters, Parameters>;

  const Given& p;
  unsigned char *strips, *outputs, *weights;
  Barrier *strip_full, *strip_ready, *strip_empty, *weights_full, *weights_empty, *residual_full,
      *turn, *tile_drawn;
  int* tiles;

  __device__ Block(const Given& parameters, unsigned char* shared) : p(parameters) {
    strips = shared;
    outputs = strips + kConsumers * kStripStages * Traits::kStripBytes;
    strip_full = reinterpret_cast<Barrier*>(outputs + kConsumers * Traits::kOutputBytes);
    strip_ready = strip_full + kConsumers * kStripStages;
    strip_empty = strip_ready + kConsumers * kStripStages;
    residual_full = strip_empty + kConsumers * kStripStages;
    turn = residual_full + kConsumers;
    weights_full = turn + 2;
    weights_empty = weights_full + kMaxStages;
    tile_drawn = weights_empty + kMaxStages;
    tiles = reinterpret_cast<int*>(tile_drawn + kTileRing);
    weights = reinterpret_cast<unsigned char*>(strip_full) + kBarrierBytes;
  }

  // Every warp calls this; four of them initialise the barriers. The places and the number of the
  // barriers are constants, so that it takes few instructions.
  __device__ void init_barriers() const {
    static_assert(Traits::kThreads >= 4 * 32, "a warp for each case");
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 > 0 || warp > 3) return;
    if (warp == 0) {
      for (int i = 0; i < kConsumers * kStripStages; ++i) {
        strip_full[i].init(1);
        strip_empty[i].init(4);
      }
    }
    if (warp == 1) {
      for (int i = 0; i < kMaxStages; ++i) weights_full[i].init(1);
    }
    if (warp == 2) {
      for (int i = 0; i < kMaxStages; ++i) weights_empty[i].init(4 * kConsumers);
    }
    if (warp == 3) {
      for (int i = 0; i < kConsumers * kStripStages; ++i) strip_ready[i].init(kWarpgroup);
      for (int i = 0; i < kConsumers; ++i) residual_full[i].init(1);
      for (int i = 0; i < 2; ++i) turn[i].init(kWarpgroup);
      if (draws()) {
        for (int i = 0; i < kTileRing; ++i) tile_drawn[i].init(1);
      }
    }
    fence_barrier_init();
  }

  // Prefetches the tensor maps that the first copies use.
  __device__ void prefetch_maps() const {
    prefetch_tensor_map(p.x_parts > 0 ? &p.maps.x[0] : &p.maps.projected[0]);
    prefetch_tensor_map(p.x_parts > 0 ? &p.maps.kernel : &p.maps.shortcut);
    if constexpr (!Traits::kWide) prefetch_tensor_map(&p.maps.y[0]);
    if (p.residual) prefetch_tensor_map(&p.maps.residual);
  }

  __device__ unsigned char* strip(int consumer, int slot) const {
    return strips + (consumer * kStripStages + slot) * Traits::kStripBytes;
  }

  // Where a strip lies in the images.
  __device__ Strip strip_at(int strip) const {
    const int sample = p.strips_of_image.quotient(strip),
              rest = p.strips_of_image.remainder(strip, sample);
    const int down = p.strips_across.quotient(rest);
    return {sample * Traits::kSamples, down * Traits::kRows,
            p.strips_across.remainder(rest, down) * Traits::kStripColumns};
  }

  // The phase (phases.h) of a chunk of an output tile.
  __device__ int image_phase(int feature, int chunk) const {
    return p.phase.quotient(kFlipped ? chunk : feature);
  }

  // The first output channel of a tile in its image. With phases, `feature` counts the features of
  // the four phase images one after the other.
  __device__ int channel_of(int feature) const {
    if constexpr (Traits::kPhases && !kFlipped)
      return p.phase.remainder(feature, p.phase.quotient(feature));
    return feature;
  }

  // Where a tile lies: its first strip and output channel. Neighbouring blocks read the same
  // pixels, which are then in L2.
  struct Place {
    int first_strip, feature;
  };
  __device__ Place place_of(int tile) const {
    const int strips = p.feature_tiles.quotient(tile);
    return {strips * kConsumers, p.feature_tiles.remainder(tile, strips) * Traits::kFeatures};
  }

  // True if blocks draw their tiles.
  __device__ bool draws() const { return p.counter >= 0; }

  // Draws a tile (tile.h). The result is known some hundred cycles later.
  __device__ unsigned draw() const {
    return atomicInc(&tile_counters[p.counter], last_draw(p.schedule.tiles));
  }

  // Tells the other roles which tile is the `n`-th that this block has drawn, and returns it.
  __device__ int publish(unsigned draw, unsigned n) const {
    const int tile = drawn_tile(draw, static_cast<int>(gridDim.x));
    tiles[n % kTileRing] = tile;
    tile_drawn[n % kTileRing].arrive();
    return tile;
  }

  // All threads of a consumer: adds shifts and residual and stores the tile through `output`, its
  // output buffer. `phase`: parity of residual_full. In forward_epilogue.cuh.
  __device__ void epilogue(const Accumulator& accumulator, const RowShifts<Traits>& shifts,
                           int consumer, const Strip& at, int feature, unsigned char* output,
                           int phase) const;
};

// The order of a block's tiles, for all roles but the producer, which draws them.
template <class Block>
struct Tiles {
  const Block& block;
  unsigned known = 0;  // tiles that have been read

  __device__ explicit Tiles(const Block& block_) : block(block_) {}
  __device__ int after(int tile) {
    return uniform(block.draws() ? read() : tile + static_cast<int>(gridDim.x), ~0u);
  }

 private:
  __device__ int read() {
    const unsigned slot = known % kTileRing;
    block.tile_drawn[slot].wait(known / kTileRing % 2);
    ++known;
    return block.tiles[slot];
  }
};

}  // namespace jaxunet::cuda::forward
