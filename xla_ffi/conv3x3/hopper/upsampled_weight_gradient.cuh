// Weight gradient of the convolution of an upsampled image on Hopper, by phases (plan.h):
//
//   dW'[a, b, u, v, c, f] = sum over pixels (i, j) of the small image of
//                           x[i + u + a - 1, j + v + b - 1, c] · dy[2i + a, 2j + b, f]
//
// These are the gradients of the taps of the phases. Each such tap is a sum of taps of the 3 × 3
// kernel, so the gradient of a kernel tap is the sum of the gradients of the phase taps that
// contain it; upsampled_weight_gradient_fold.cu adds them.
//
// The kernel has the structure of weight_gradient.cuh and shares its mainloop, helpers, strips and
// split-K. The differences:
//
// A block owns 64 input × 64 output channels and the eight taps of two phases, (a, 0) and (a, 1).
// So a haloed strip of x is read once for two strips of dy, because L2 bandwidth limits this
// kernel. A stage of the ring holds x and, in a box for each phase, dy.
//
// Each of four consumers owns a row of taps, (b, u): a wgmma of 64 × 128 multiplies the dy of its
// phase by x at the two taps v.
//
// The helpers sum both boxes of dy. The blocks of a = 0 and those of a = 1 store these sums in
// separate slots.
#pragma once

#include "common/fast_divmod.h"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "conv3x3/hopper/phases.h"
#include "conv3x3/hopper/upsampled_weight_gradient.h"
#include "conv3x3/hopper/weight_gradient_helpers.cuh"
#include "conv3x3/hopper/weight_gradient_mainloop.cuh"
#include "conv3x3/hopper/weight_gradient_parameters.cuh"
#include "conv3x3/hopper/weight_gradient_share.cuh"

namespace jaxunet::cuda::weight_gradient {

// The kernel's only parameter.
struct UpsampledParameters {
  CUtensorMap x, dy[kPhases];
  int samples;  // of a strip
  int features;
  FastDivmod feature_blocks, x_blocks;  // chunks of dy's channels, and of those of x
  Work kernel;
  int height, width;  // of the small image
  FastDivmod strips_of_sample, strips_across;
  float* partials;      // (splits, tiles) of UpsampledTile
  ShiftPartials shift;  // of a = 0
};

template <class T_, bool kPacked_>
struct UpsampledBlock : StripLayout<kPacked_>, Share<UpsampledParameters> {
  using T = T_;
  using Layout = StripLayout<kPacked_>;
  static constexpr int kConsumers = UpsampledTile::kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kXBytes = Layout::kXBytes, kStageDyBytes = 2 * kDyBytes;
  static constexpr int kTaps = 2;  // per consumer
  static constexpr int kStages =
      (kMaxSharedBytes - kBarrierBytes - kScratchBytes) / (kXBytes + kStageDyBytes);
  static constexpr int kRingBytes = kStages * (kXBytes + kStageDyBytes);
  static constexpr int kBytes = kRingBytes + kBarrierBytes + kScratchBytes;
  static_assert(kStages >= 3, "one stage in use, one not yet released, one being filled");

  int a;  // the parity of the rows of dy

  __device__ UpsampledBlock(const UpsampledParameters& parameters, unsigned char* shared)
      : Share(parameters) {
    x = shared;
    dy = x + kStages * kXBytes;
    full = reinterpret_cast<Barrier*>(dy + kStages * kStageDyBytes);
    empty = full + kStages;
    scratch = reinterpret_cast<float*>(dy + kStages * kStageDyBytes + kBarrierBytes);
    // Neighbouring blocks read the same pixels, which are then in L2.
    const int at = static_cast<int>(blockIdx.x);
    split = p.kernel.by_tiles.quotient(at);
    tile = at - split * p.kernel.tiles;
    const int row = p.feature_blocks.quotient(tile);  // row of tiles: a, then x_block
    feature = p.feature_blocks.remainder(tile, row) * kChunk;
    a = p.x_blocks.quotient(row);
    x_block = p.x_blocks.remainder(row, a);
    first = p.kernel.first(split);
    count = p.kernel.count(split);
    chunks = 0;
    x_blocks = static_cast<int>(p.x_blocks.divisor);
    sums_dy = own_sample() * static_cast<int>(p.strips_of_sample.divisor) < first + count;
  }

  __device__ void prefetch_maps() const {
    prefetch_tensor_map(&p.x);
    for (int b = 0; b < 2; ++b) prefetch_tensor_map(&p.dy[2 * a + b]);
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      // One arrival for each consumer warp, and for each helper warp if the helpers read dy.
      empty[i].init(4 * kConsumers + (sums_dy ? kHelpers / 32 : 0));
    }
  }

  // The block as consumer (b, u) sees it: dy points to the consumer's phase, and x to the pixel
  // that tap (0, 0) of this phase reads.
  __device__ UpsampledBlock of_phase(int b) const {
    UpsampledBlock block = *this;
    block.x += a * Layout::kBelow + b * Layout::kRight;
    block.dy += b * kDyBytes;
    return block;
  }

  // For the helpers, as in weight_gradient_block.cuh.
  __device__ const unsigned char* first_dy() const { return dy; }
  __device__ int bytes_to_next_dy() const { return kStageDyBytes; }
  __device__ int ring_stages() const { return kStages; }
  __device__ int first_split(int sample) const { return p.kernel.split_k.first_split(sample); }
  __device__ ShiftPartials shift() const {
    ShiftPartials own = p.shift;
    own.to += static_cast<int64_t>(a) * own.slots * own.batch * own.features;
    return own;
  }
};

// Stores the accumulators of a row of taps.
template <class Block>
__device__ inline void epilogue(const Block& block, int, const float (&accumulator)[64]) {
  store_entries<UpsampledTile>(
      block.p.partials + (static_cast<int64_t>(block.split) * block.p.kernel.tiles + block.tile) *
                             UpsampledTile::kEntries,
      threadIdx.x / kWarpgroup, accumulator);
}

// Fills the ring with haloed x and the dy of both phases.
template <class Block>
__device__ inline void produce_phases(const Block& block) {
  const UpsampledParameters& p = block.p;
  const int bytes = Block::loaded_x_bytes(p.samples) + Block::kStageDyBytes;
  Strip at = block.strip_at(block.first);
  for (int i = 0; i < block.count; ++i, block.step(at)) {
    const int stage = i % Block::kStages;
    const Strip from = block.for_tma(at);
    Barrier* full = &block.full[stage];
    block.empty[stage].wait(i / Block::kStages % 2 ^ 1);  // returns at once in the first round
    full->arrive_expect(bytes);
    for (int b = 0; b < 2; ++b) {
      load_strip<Block::kPacked>(block.dy + stage * Block::kStageDyBytes + b * kDyBytes,
                                 &p.dy[2 * block.a + b], full, block.feature, from, 0);
    }
    load_strip<Block::kPacked>(block.x + stage * Block::kXBytes, &p.x, full, block.x_block * kChunk,
                               from, 1);
  }
}

// Registers per thread. All threads start with 96. The fifth warpgroup gives up 40, and each of the
// four consumers takes eight more, because setmaxnreg counts in eights.
constexpr int kPhaseConsumerRegisters = 104, kPhaseHelperRegisters = 56;

template <class T, bool kPacked>
__global__ void __launch_bounds__(UpsampledBlock<T, kPacked>::kThreads, 1)
    hopper_upsampled_weight_gradient_kernel(
        const __grid_constant__ UpsampledParameters parameters) {
#ifdef JAXUNET_SM90A_PASS
  using Block = UpsampledBlock<T, kPacked>;
  const Block block(parameters, shared_memory());
  if (threadIdx.x == 0) {
    block.init_barriers();
    fence_barrier_init();
  }
  if (threadIdx.x == Block::kThreads - 1) block.prefetch_maps();
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup < Block::kConsumers) {
    set_registers<kPhaseConsumerRegisters, true>();
    consume(block.of_phase(warpgroup / 2), warpgroup % 2);
  } else {
    set_registers<kPhaseHelperRegisters, false>();
    const int thread = threadIdx.x % kWarpgroup;
    if (thread == 0) produce_phases(block);
    if (thread >= kWarpgroup - kHelpers && block.sums_dy) help(block);
  }
#else
  __trap();  // never launched: common/device.h
#endif
}

}  // namespace jaxunet::cuda::weight_gradient
