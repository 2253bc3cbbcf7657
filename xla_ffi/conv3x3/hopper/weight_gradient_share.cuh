// Shared by the kernels of the Hopper weight gradients: a block's share of the work, and the layout
// of a strip in shared memory.
#pragma once

#include "conv3x3/hopper/strip.cuh"
#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda::weight_gradient {

constexpr int kRows = 8;  // image rows per strip
// Only the geometry of these tiles is used: rows, transposed and samples.
constexpr Tile kStrip{kRows, 0, 1, 1, false, false}, kPackedStrip{4, 0, 1, 1, true, false, 4};
// Bytes of a strip of dy or of a projected chunk, in boxes without a halo.
constexpr int kDyBytes = kRows * kStripColumns * kRowBytes;
// Samples per strip for images of at most four rows, and for 4 × 4 images.
constexpr int kPairedSamples = 2, kPackedSamples = kPackedStrip.samples;
static_assert(kPairedSamples * (kRows / kPairedSamples + 2) * kHaloColumns * kRowBytes <=
                  kStrip.strip_bytes(),
              "two samples with their halos fit the stage of one strip");
static_assert(kPackedStrip.pixels() == kStrip.pixels() &&
                  kPackedStrip.strip_columns() * kPackedSamples == 16,
              "a packed strip has as many pixels, and 16 steps of K are one of its rows");
constexpr int kHelpers = 96;                 // threads of three warps
constexpr int kHelperPixels = kHelpers / 8;  // pixels that they read at a time, eight threads each
constexpr int kScratchBytes = kHelperPixels * kChunk * 4;  // for their sums

// Samples per strip. A single image of at most four rows would leave half of a strip empty, a 4 × 4
// image three quarters.
constexpr int samples_of_strip(int64_t height, int64_t width) {
  if (height > kRows / kPairedSamples) return 1;
  return kPackedStrip.fits(height, width) ? kPackedSamples : kPairedSamples;
}

template <bool kPacked_>
struct StripLayout {
  static constexpr bool kPacked = kPacked_;
  static constexpr Tile kTile = kPacked ? kPackedStrip : kStrip;
  static constexpr int kXBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes();
  // Bytes from a haloed pixel to its right neighbour (packed: of the same sample), to the next
  // eight steps of K (eight pixels), and to the pixel below.
  static constexpr int kRight = kTile.samples * kRowBytes,
                       kEight = kTile.group_stride_rows() * kRowBytes,
                       kBelow = kTile.halo_columns() * kRight;
  static constexpr int kRowsOfStep = kPacked ? 1 : 2;  // image rows per 16 steps of K

  // Bytes that TMA loads for the haloed x of a strip of `samples` samples.
  __device__ static int loaded_x_bytes(int samples) {
    return kPacked ? kBoxBytes : (kRows + 2 * samples) * kHaloColumns * kRowBytes;
  }
};

template <class Parameters>
struct Share {
  const Parameters& p;
  unsigned char *x, *dy;  // the ring; for the shortcut's gradient, all of it begins at x
  Barrier *full, *empty;
  float* scratch;  // (kHelperPixels, 64)
  int split;
  int tile;          // index in the gradient: x_block, then feature
  int x_block;       // the chunk of x, or the group of block_chunks projected chunks
  int feature;       // first of the tile's 64
  int first, count;  // strips of the split
  int chunks;        // projected chunks of this block; 0: the kernel's gradient
  // The blocks that differ only in x_block all load the same dy. They take turns at summing it,
  // sample by sample. `sums_dy`: this block has a turn within its split.
  int x_blocks;
  bool sums_dy;

  __device__ explicit Share(const Parameters& parameters) : p(parameters) {}

  // The x_block of the blocks that sum a sample's dy.
  __device__ int turn_of(int sample) const {
    return p.x_blocks.remainder(sample, p.x_blocks.quotient(sample));
  }
  // The first sample, from the split's first sample on, for which it is this block's turn.
  __device__ int own_sample() const {
    const int first_sample = p.strips_of_sample.quotient(first),
              ahead = x_block - turn_of(first_sample);
    return first_sample + (ahead < 0 ? ahead + x_blocks : ahead);
  }

  // Strip::sample counts groups of `p.samples` here, because a strip holds that many samples.
  __device__ Strip strip_at(int strip) const {
    const int sample = p.strips_of_sample.quotient(strip),
              rest = p.strips_of_sample.remainder(strip, sample),
              down = p.strips_across.quotient(rest);
    return {sample, down * kRows, p.strips_across.remainder(rest, down) * kStripColumns};
  }

  // The same strip for TMA, with Strip::sample counting single samples.
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
