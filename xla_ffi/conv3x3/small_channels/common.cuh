// Shared by the kernels for at most eight channels or features: 16-bit types, compute capability
// 8.0 and later (mma.sync.m16n8k16). Memory bandwidth limits such a convolution. Of its two images,
// x and y (or dy), "small" is the one with at most eight channels and "large" the other. Each
// kernel reads or writes the large image once, 16 bytes at a time.
#pragma once

#include "conv3x3/channels.cuh"
#include "conv3x3/dispatch.h"

namespace jaxunet::cuda {

constexpr int kWide = 64;  // channels per chunk of the large image: 128 bytes of a pixel

// The kernel, in the layout of the plan.
struct Weights {
  const void* data;
  int channels, features;
  bool flipped;

  template <class T>
  __device__ T at(int tap, int channel, int feature) const {
    const int64_t entry =
        flipped ? (static_cast<int64_t>(8 - tap) * features + feature) * channels + channel
                : (static_cast<int64_t>(tap) * channels + channel) * features + feature;
    return static_cast<const T*>(data)[entry];
  }
};

// A batch of images cut into tiles of `kRows` × `kColumns` pixels.
template <int kRows_, int kColumns_>
struct Tiling {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kHaloColumns = kColumns + 2,
                       kHaloPixels = (kRows + 2) * kHaloColumns, kPixels = kRows * kColumns;
  int height, width;
  int down, across;  // tiles per image
  int tiles;         // in the batch

  template <class Plan>
  explicit Tiling(const Plan& plan)
      : height(static_cast<int>(plan.height)),
        width(static_cast<int>(plan.width)),
        down((height + kRows - 1) / kRows),
        across((width + kColumns - 1) / kColumns),
        tiles(static_cast<int>(plan.batch) * down * across) {}

  struct At {
    int sample, row, column;  // a tile's first pixel, without the halo
  };
  __device__ At at(int tile) const {
    const int each = down * across, sample = tile / each, rest = tile - sample * each;
    return {sample, rest / across * kRows, rest % across * kColumns};
  }
  __device__ bool inside(int row, int column) const {
    return row >= 0 && row < height && column >= 0 && column < width;
  }
  // The row of a pixel in an array (batch · height · width, channels).
  __device__ int64_t index(int sample, int row, int column) const {
    return (static_cast<int64_t>(sample) * height + row) * width + column;
  }
};

// 64 channels of an image in parts.
struct Chunk {
  int part, channel;  // the first channel, in a part
  int first;          // the same channel, counted over all parts
  int width;          // channels of the part

  __device__ static Chunk of(const Channels& all, int number) {
    Chunk chunk{0, number * kWide, 0, all.widths[0]};
    while (chunk.part + 1 < all.count && chunk.channel >= chunk.width) {
      chunk.channel -= (chunk.width + kWide - 1) / kWide * kWide;
      chunk.first += chunk.width;
      chunk.width = all.widths[++chunk.part];
    }
    chunk.first += chunk.channel;
    return chunk;
  }
};

// The byte offset in shared memory of channels 8 · eighth to 8 · eighth + 7 in a tile of 64-channel
// pixels. The same channels of eight pixels lie in different banks.
__device__ inline int swizzled(int pixel, int eighth) {
  return pixel * kWide * 2 + ((eighth ^ pixel % 8) << 4);
}

// A pixel of the small image, padded with zeros to kChannels.
template <class T, int kChannels>
struct alignas(2 * kChannels) SmallPixel {
  T at[kChannels];

  // `from` has `channels` channels; null: a pixel of zeros.
  __device__ void load(const T* from, int channels) {
    if (from && channels == kChannels) {
      *this = *reinterpret_cast<const SmallPixel*>(from);
      return;
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) at[i] = from && i < channels ? from[i] : narrow<T>(0.0f);
  }
};

}  // namespace jaxunet::cuda
