// Shared by all warpgroups of a block of hopper_weight_gradient_kernel: its part of the work, the
// shared-memory map, the barriers. weight_gradient.cuh describes them.
#pragma once

#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "conv3x3/hopper/weight_gradient_parameters.cuh"
#include "conv3x3/hopper/weight_gradient_share.cuh"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda::weight_gradient {

constexpr int kConsumers = 3;  // warpgroups: one for each row of taps
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kChunksOfConsumer = 2;  // projected chunks per consumer
static_assert(kMaxBlockChunks == kChunksOfConsumer * kConsumers,
              "the consumers divide the chunks of a block");

template <class T_, bool kPacked_>
struct Block : StripLayout<kPacked_>, Share<Member> {
  using T = T_;
  using Layout = StripLayout<kPacked_>;
  static constexpr int kXBytes = Layout::kXBytes;
  static constexpr int kStages = 8;  // most stages of the ring
  static constexpr int kTaps = 3;    // per consumer
  static constexpr int kStageDyBytes = kDyBytes;
  static constexpr int kRingBytes = kStages * (kXBytes + kDyBytes);
  static constexpr int kBytes = kRingBytes + kBarrierBytes + kScratchBytes;
  static_assert(kBytes <= kMaxSharedBytes && kXBytes % 1024 == 0,
                "the ring fits, and its stages begin where the swizzle pattern starts");
  static_assert(3 * (1 + kMaxBlockChunks) * kDyBytes <= kRingBytes,
                "one stage in use, one not yet released, one being filled");

  const CUtensorMap* maps;

  // `index`: of the block among those of its member.
  __device__ Block(const Member& member, const CUtensorMap* maps_, int index, unsigned char* shared)
      : Share(member), maps(maps_) {
    x = shared;
    dy = x + kStages * kXBytes;
    full = reinterpret_cast<Barrier*>(dy + kStages * kDyBytes);
    empty = full + kStages;
    scratch = reinterpret_cast<float*>(dy + kStages * kDyBytes + kBarrierBytes);
    // Neighbouring blocks read the same pixels, which are then in L2.
    const int kernel_blocks = p.kernel.blocks();
    const bool projected = index >= kernel_blocks;
    const int at = projected ? index - kernel_blocks : index;
    const Work& own = projected ? p.shortcut : p.kernel;
    split = own.by_tiles.quotient(at);
    tile = at - split * own.tiles;
    x_block = p.feature_blocks.quotient(tile);
    feature = p.feature_blocks.remainder(tile, x_block) * kChunk;
    first = own.first(split);
    count = own.count(split);
    const int rest = p.shortcut_chunks - x_block * p.block_chunks;
    chunks = projected ? (rest < p.block_chunks ? rest : p.block_chunks) : 0;
    x_blocks = static_cast<int>(p.x_blocks.divisor);
    const int sample = own_sample();
    sums_dy = (!projected || p.kernel.tiles == 0) && x_block < x_blocks &&
              sample * static_cast<int>(p.strips_of_sample.divisor) < first + count;
  }

  // Shortcut's gradient: a stage holds dy, then the projected chunks, in boxes of equal size.
  __device__ int stage_bytes() const { return (1 + chunks) * kDyBytes; }
  __device__ int stages() const {
    const int fit = kRingBytes / stage_bytes();
    return fit < kStages ? fit : kStages;
  }

  __device__ const CUtensorMap* map(int index) const { return maps + index; }
  __device__ const CUtensorMap* map(const Image& image, int part) const {
    return maps + image.maps + part;
  }

  // Prefetches the tensor maps that the first copies use.
  __device__ void prefetch_maps() const {
    const Image& image = chunks ? p.projected : p.x;
    prefetch_tensor_map(map(p.dy));
    prefetch_tensor_map(map(image, Place(image, chunks ? x_block * p.block_chunks : x_block).part));
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      // One arrival for each warp of a consumer that has work, and for each helper warp if the
      // helpers read dy.
      empty[i].init(
          4 * (chunks ? (chunks + kChunksOfConsumer - 1) / kChunksOfConsumer : kConsumers) +
          (sums_dy ? kHelpers / 32 : 0));
    }
  }

  // For the helpers: dy of the first stage, the bytes from one stage to the next, the number of
  // stages, the first split that meets a sample, and where the sums go.
  __device__ const unsigned char* first_dy() const { return chunks ? x : dy; }
  __device__ int bytes_to_next_dy() const { return chunks ? stage_bytes() : kDyBytes; }
  __device__ int ring_stages() const { return chunks ? stages() : kStages; }
  __device__ int first_split(int sample) const {
    return (chunks ? p.shortcut : p.kernel).split_k.first_split(sample);
  }
  __device__ const ShiftPartials& shift() const { return p.shift; }
};

}  // namespace jaxunet::cuda::weight_gradient
