// Shared by all warpgroups of a block of hopper_weight_gradient_kernel: its part of the work, the
// shared-memory map, the barriers. weight_gradient.cuh describes them.
#pragma once

#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "conv3x3/hopper/strip.cuh"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/hopper/weight_gradient_parameters.cuh"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda::weight_gradient {

constexpr int kRows = 8;       // image rows of a strip
constexpr int kConsumers = 3;  // warpgroups: one for each row of taps
constexpr int kStages = 8;     // of the ring, at most
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
// Only the geometry of these tiles is used: rows, transposed and samples.
constexpr Tile kStrip{kRows, 0, 1, 1, false, false}, kPackedStrip{4, 0, 1, 1, true, false, 4};
// dy of a strip, or a projected chunk: boxes without a halo.
constexpr int kDyBytes = kRows * kStripColumns * kRowBytes;
// Samples of a strip: of images of at most four rows, and of 4 × 4 images.
constexpr int kPairedSamples = 2, kPackedSamples = kPackedStrip.samples;
static_assert(kPairedSamples * (kRows / kPairedSamples + 2) * kHaloColumns * kRowBytes <=
                  kStrip.strip_bytes(),
              "two samples with their halos fit the stage of one strip");
static_assert(kPackedStrip.pixels() == kStrip.pixels() &&
                  kPackedStrip.strip_columns() * kPackedSamples == 16,
              "a packed strip has as many pixels, and 16 steps of K are one of its rows");
constexpr int kHelpers = 96;                 // threads of three warps
constexpr int kHelperPixels = kHelpers / 8;  // that they read at a time: eight threads a pixel
constexpr int kChunksOfConsumer = 2;         // projected chunks
static_assert(kMaxBlockChunks == kChunksOfConsumer * kConsumers,
              "the consumers divide the chunks of a block");

template <class T_, bool kPacked_>
struct Block {
  using T = T_;
  static constexpr bool kPacked = kPacked_;
  static constexpr Tile kTile = kPacked ? kPackedStrip : kStrip;
  static constexpr int kXBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes();
  static constexpr int kRingBytes = kStages * (kXBytes + kDyBytes);
  static constexpr int kBytes = kRingBytes + kBarrierBytes + kHelperPixels * kChunk * 4;
  static_assert(kBytes <= kMaxSharedBytes && kXBytes % 1024 == 0,
                "the ring fits, and its stages begin where the swizzle pattern starts");
  static_assert(3 * (1 + kMaxBlockChunks) * kDyBytes <= kRingBytes,
                "one stage in use, one not yet released, one being filled");
  // Bytes from a haloed pixel to the one on its right (packed: of the same sample), to the next
  // eight steps of K, which are eight pixels, and to the pixel below.
  static constexpr int kRight = kTile.samples * kRowBytes,
                       kEight = kTile.group_stride_rows() * kRowBytes,
                       kBelow = kTile.halo_columns() * kRight;
  static constexpr int kRowsOfStep = kPacked ? 1 : 2;  // image rows of 16 steps of K

  const Parameters& p;
  unsigned char *x, *dy;  // the ring; a block of the shortcut's gradient uses all of it from x on
  Barrier *full, *empty;
  float* scratch;  // (kHelperPixels, 64)
  int split;
  int tile;          // of the block's gradient: x_block, then feature
  int x_block;       // the chunk of x, or the group of block_chunks projected chunks
  int feature;       // the first of 64
  int first, count;  // strips of the split
  int chunks;        // projected, that this block multiplies; 0: a block of the kernel's gradient
  // The blocks that differ only in x_block all load the same dy. They take turns at summing it,
  // sample by sample. `sums_dy`: a turn of this block comes in its split.
  int x_blocks;
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
    feature = p.feature_blocks.remainder(tile, x_block) * kChunk;
    first = work.first(split);
    count = work.count(split);
    const int rest = p.shortcut_chunks - x_block * p.block_chunks;
    chunks = projected ? (rest < p.block_chunks ? rest : p.block_chunks) : 0;
    x_blocks = static_cast<int>(p.x_blocks.divisor);
    const int first_sample = p.strips_of_sample.quotient(first),
              ahead = x_block - turn_of(first_sample);
    // The first sample from there on whose turn is this block's.
    const int own_sample = first_sample + (ahead < 0 ? ahead + x_blocks : ahead);
    sums_dy = (!projected || p.kernel.tiles == 0) && x_block < x_blocks &&
              own_sample * static_cast<int>(p.strips_of_sample.divisor) < first + count;
  }

  // The x_block whose blocks sum the dy of a sample.
  __device__ int turn_of(int sample) const {
    return p.x_blocks.remainder(sample, p.x_blocks.quotient(sample));
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

  // A Strip's sample is counted here in groups of `p.samples`, the samples of one strip.
  __device__ Strip strip_at(int strip) const {
    const int sample = p.strips_of_sample.quotient(strip),
              rest = p.strips_of_sample.remainder(strip, sample),
              down = p.strips_across.quotient(rest);
    return {sample, down * kRows, p.strips_across.remainder(rest, down) * kStripColumns};
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
