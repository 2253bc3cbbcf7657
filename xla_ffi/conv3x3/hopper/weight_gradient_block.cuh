// Shared by all warpgroups of a block of hopper_weight_gradient_kernel: its part of the work, the
// shared-memory map, the barriers. weight_gradient.cuh describes them.
#pragma once

#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "conv3x3/hopper/strip.cuh"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/hopper/weight_gradient_parameters.cuh"

namespace jaxunet::cuda::weight_gradient {

constexpr int kRows = 8;       // image rows of a strip
constexpr int kConsumers = 3;  // warpgroups: one for each row of taps
constexpr int kStages = 8;     // of the ring
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr Tile kStrip{kRows, 0, 1, 1, false, false}, kPackedStrip{4, 0, 1, 1, true, false, 4};
constexpr int kDyBytes = kRows * kStripColumns * kRowBytes;
// Samples of a strip: of images of at most four rows, and of 4 × 4 images.
constexpr int kPairedSamples = 2, kPackedSamples = kPackedStrip.samples;
static_assert(kPairedSamples * (kRows / kPairedSamples + 2) * kHaloColumns * kRowBytes <=
              kStrip.strip_bytes());
static_assert(kPackedStrip.pixels() == kStrip.pixels() &&
              kPackedStrip.strip_columns() * kPackedSamples == 16);
constexpr int kHelpers = 96;                 // threads of three warps
constexpr int kHelperPixels = kHelpers / 8;  // that they read at a time: eight threads a pixel
constexpr int kChunksOfConsumer = 2,
              kMaxChunks = kChunksOfConsumer * kConsumers;  // of the shortcut's gradient

template <class T_, bool kPacked_>
struct Block {
  using T = T_;
  static constexpr bool kPacked = kPacked_;
  static constexpr Tile kTile = kPacked ? kPackedStrip : kStrip;
  static constexpr int kXBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes();
  static constexpr int kRingBytes = kStages * (kXBytes + kDyBytes);
  static constexpr int kBytes = kRingBytes + kBarrierBytes + kHelperPixels * kChunk * 4;
  static_assert(kBytes <= kMaxSharedBytes && kXBytes % 1024 == 0);
  static_assert(3 * (1 + kMaxChunks) * kDyBytes <= kRingBytes,
                "one stage in use, one not yet released, one being filled");
  // Bytes from a haloed pixel to the one on its right, to the next eight steps of K, and to the
  // pixel below.
  static constexpr int kRight = kTile.samples * kRowBytes,
                       kEight = kTile.group_stride_rows() * kRowBytes,
                       kBelow = kTile.halo_columns() * kRight;
  static constexpr int kRowsOfStep = kPacked ? 1 : 2;  // image rows of 16 steps of K

  const Parameters& p;
  unsigned char *x, *dy;
  Barrier *full, *empty;
  float* scratch;  // (kHelperPixels, 64)
  int split, tile, x_block, feature;
  int first, count;  // strips
  int chunks;        // projected; 0: a block of the kernel's gradient
  int x_blocks;      // that take turns at summing the dy of a sample
  bool sums_dy;

  __device__ Block(const Parameters& parameters, unsigned char* shared) : p(parameters) {
    x = shared;
    dy = x + kStages * kXBytes;
    full = reinterpret_cast<Barrier*>(dy + kStages * kDyBytes);
    empty = full + kStages;
    scratch = reinterpret_cast<float*>(dy + kStages * kDyBytes + kBarrierBytes);
    // Neighbouring blocks share pixels, which L2 then serves.
    const int kernel_blocks = p.kernel.blocks(), index = static_cast<int>(blockIdx.x);
    const bool projected = index >= kernel_blocks;
    const int at = projected ? index - kernel_blocks : index;
    const Work& work = projected ? p.shortcut : p.kernel;
    split = work.by_tiles.quotient(at);
    tile = at - split * work.tiles;
    x_block = p.feature_blocks.quotient(tile);
    feature = (tile - x_block * static_cast<int>(p.feature_blocks.divisor)) * kChunk;
    first = work.first(split);
    count = work.count(split);
    const int rest = p.shortcut_chunks - x_block * p.block_chunks;
    chunks = projected ? (rest < p.block_chunks ? rest : p.block_chunks) : 0;
    // True if this split meets a sample whose dy this block sums.
    x_blocks = static_cast<int>(p.x_blocks.divisor);
    const int met = p.strips_of_sample.quotient(first), ahead = x_block - turn_of(met);
    const int own = met + (ahead < 0 ? ahead + x_blocks : ahead);
    sums_dy = (!projected || p.kernel.tiles == 0) && x_block < x_blocks &&
              own * static_cast<int>(p.strips_of_sample.divisor) < first + count;
  }

  // The x_block whose blocks sum the dy of a sample: they take turns, because all of them load it.
  __device__ int turn_of(int sample) const {
    return sample - p.x_blocks.quotient(sample) * x_blocks;
  }

  // A stage of a block of the shortcut's gradient: dy, then the chunks, boxes of one size.
  __device__ int stage_bytes() const { return (1 + chunks) * kDyBytes; }
  __device__ int stages() const {
    const int fit = kRingBytes / stage_bytes();
    return fit < kStages ? fit : kStages;
  }

  // The maps that the first copies use.
  __device__ void prefetch_maps() const {
    const Image& image = chunks ? p.projected : p.x;
    prefetch_tensor_map(&p.dy);
    prefetch_tensor_map(
        &image.maps[Place(image, chunks ? x_block * p.block_chunks : x_block).part]);
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      // One for each warp of the consumers that have work, and for each helper warp that reads dy.
      empty[i].init(
          4 * (chunks ? (chunks + kChunksOfConsumer - 1) / kChunksOfConsumer : kConsumers) +
          (sums_dy ? kHelpers / 32 : 0));
    }
  }

  // The sample of a strip is counted in groups of `p.samples`, the samples of one strip.
  __device__ Strip strip_at(int strip) const {
    const int sample = p.strips_of_sample.quotient(strip);
    const int rest = strip - sample * static_cast<int>(p.strips_of_sample.divisor),
              down = p.strips_across.quotient(rest);
    return {sample, down * kRows,
            (rest - down * static_cast<int>(p.strips_across.divisor)) * kStripColumns};
  }

  // The same strip for TMA, its sample counted one by one.
  __device__ Strip for_tma(const Strip& at) const {
    return {at.sample * p.samples, at.row, at.column};
  }

  // Steps to the next strip without a division.
  __device__ void step(Strip& at) const {
    if ((at.column += kStripColumns) < p.width) return;
    at.column = 0;
    if ((at.row += kRows) < p.height) return;
    at.row = 0;
    ++at.sample;
  }
};

}  // namespace jaxunet::cuda::weight_gradient
