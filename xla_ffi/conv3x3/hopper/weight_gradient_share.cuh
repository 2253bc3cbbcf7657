// Shared by the kernels of the Hopper weight gradients: a block's share of the work, and the layout
// of a strip in shared memory.
#pragma once

#include "conv3x3/hopper/strip.cuh"
#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda::weight_gradient {

constexpr int kRows = 8;  // image rows of a strip
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
constexpr int kScratchBytes = kHelperPixels * kChunk * 4;  // their sums

// Samples of a strip. Alone, images of at most four rows would leave half of a strip empty, 4 × 4
// images three quarters.
constexpr int samples_of_strip(int64_t height, int64_t width) {
  if (height > kRows / kPairedSamples) return 1;
  return kPackedStrip.fits(height, width) ? kPackedSamples : kPairedSamples;
}

template <bool kPacked_>
struct StripLayout {
  static constexpr bool kPacked = kPacked_;
  static constexpr Tile kTile = kPacked ? kPackedStrip : kStrip;
  static constexpr int kXBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes();
  // Bytes from a haloed pixel to the one on its right (packed: of the same sample), to the next
  // eight steps of K, which are eight pixels, and to the pixel below.
  static constexpr int kRight = kTile.samples * kRowBytes,
                       kEight = kTile.group_stride_rows() * kRowBytes,
                       kBelow = kTile.halo_columns() * kRight;
  static constexpr int kRowsOfStep = kPacked ? 1 : 2;  // image rows of 16 steps of K

  // The bytes of the box of haloed x, of which a strip of `samples` samples is loaded.
  __device__ static int loaded_x_bytes(int samples) {
    return kPacked ? kBoxBytes : (kRows + 2 * samples) * kHaloColumns * kRowBytes;
  }
};

template <class Parameters>
struct Share {
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

  __device__ explicit Share(const Parameters& parameters) : p(parameters) {}

  // The x_block whose blocks sum the dy of a sample.
  __device__ int turn_of(int sample) const {
    return p.x_blocks.remainder(sample, p.x_blocks.quotient(sample));
  }
  // The first sample of the split, or after it, whose turn is this block's.
  __device__ int own_sample() const {
    const int first_sample = p.strips_of_sample.quotient(first),
              ahead = x_block - turn_of(first_sample);
    return first_sample + (ahead < 0 ? ahead + x_blocks : ahead);
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
