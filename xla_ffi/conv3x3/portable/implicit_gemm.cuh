// The convolution as a matrix product, and where the entries of its matrices lie: for every shape, on every GPU.
//
// The left matrix has a row for each pixel and a column for each (tap, channel), column = tap · channels + channel;
// then, for a 1×1 shortcut, a column for each channel that it projects at the pixel itself. The right matrix has the
// same columns as its rows: it is the kernel (3, 3, channels, features) as it lies in memory, with the shortcut's
// (channels, features) below.
#pragma once

#include "common/types.cuh"
#include "conv3x3/plan.h"

namespace jaxunet::cuda {

// Arrays side by side along their last dimension.
struct Channels {
  const void* data[kMaxParts];
  int widths[kMaxParts];
  int count, total;

  // The entry of `row` and `channel`, which lies in the image and below `total`.
  template <class T>
  __device__ const T* at(int64_t row, int channel) const {
#pragma unroll
    for (int i = 0; i < kMaxParts - 1; ++i) {
      if (i + 1 >= count || channel < widths[i]) return static_cast<const T*>(data[i]) + row * widths[i] + channel;
      channel -= widths[i];
    }
    return static_cast<const T*>(data[kMaxParts - 1]) + row * widths[kMaxParts - 1] + channel;
  }
};

inline Channels channels_of(const Parts& parts) {
  Channels all{};
  all.count = parts.count;
  all.total = static_cast<int>(parts.total);
  for (int i = 0; i < parts.count; ++i) {
    all.data[i] = parts.data[i];
    all.widths[i] = static_cast<int>(parts.channels[i]);
  }
  return all;
}

// Whether eight channels that start at a multiple of eight always lie in line, in one array.
inline bool in_eights(const Channels& all) {
  for (int i = 0; i < all.count; ++i) {
    if (all.widths[i] % 8) return false;
  }
  return true;
}

struct Pixel {
  int64_t row;  // of an array seen as (batch · height · width, channels)
  int sample, y, x;
};

// The left matrix.
struct Left {
  Channels x, extra;
  int pixels, height, width, columns;
  Rows a, b;     // data is null without activation
  bool vectors;  // eight columns at a time

  __device__ Pixel pixel(int index) const {
    const int line = index / width, sample = line / height;
    return {index, sample, line - sample * height, index - line * width};
  }

  // The activated entry of a channel, as the type of x holds it.
  template <class T>
  __device__ T activated(T value, int sample, int channel) const {
    if (!a.data) return value;
    return narrow<T>(
        silu_exact(a.data[sample * a.stride + channel] * wide(value) + b.data[sample * b.stride + channel]));
  }

  // Where the tap of `column` reads, or null in the padding and past the last column.
  template <class T>
  __device__ const T* entry(const Pixel& pixel, int column, int* channel) const {
    const int tap = column < 9 * x.total ? column / x.total : 9, y = pixel.y + tap / 3 - 1, x_ = pixel.x + tap % 3 - 1;
    *channel = column - tap * x.total;
    if (tap >= 9) {
      *channel = -1;
      return column < columns ? extra.at<T>(pixel.row, column - 9 * x.total) : nullptr;
    }
    if (y < 0 || y >= height || x_ < 0 || x_ >= width) return nullptr;
    return x.at<T>(pixel.row + (y - pixel.y) * width + x_ - pixel.x, *channel);
  }

  // Columns `column` to `column` + 7 of a pixel; an index past the last pixel gives zeros.
  template <class T>
  __device__ void load(int index, int column, Eight<T>& out) const {
    out.clear();
    if (index >= pixels) return;
    const Pixel here = pixel(index);
    int channel;
    if (vectors) {
      const T* from = entry<T>(here, column, &channel);
      if (!from) return;
      out.load(from);
      if (channel < 0 || !a.data) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) out.at[i] = activated(out.at[i], here.sample, channel + i);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T* from = entry<T>(here, column + i, &channel);
      if (from) out.at[i] = channel < 0 ? *from : activated(*from, here.sample, channel);
    }
  }
};

// The right matrix of the convolution.
struct Right {
  const void *kernel, *shortcut;
  int channels, features, columns;
  bool flipped;  // the kernel lies as (3, 3, features, channels) and is read as kernel[::-1, ::-1] transposed, the
                 // shortcut as (features, channels)
  bool vectors;  // eight features (flipped: eight channels) at a time

  template <class T>
  __device__ T entry(int column, int feature) const {
    if (column >= columns || feature >= features) return narrow<T>(0.0f);
    const int extra = column - 9 * channels;
    if (extra >= 0) return static_cast<const T*>(shortcut)[flipped ? turned(extra, feature) : straight(extra, feature)];
    const int tap = column / channels, channel = column - tap * channels;
    if (!flipped) return static_cast<const T*>(kernel)[static_cast<int64_t>(column) * features + feature];
    return static_cast<const T*>(kernel)[(static_cast<int64_t>(8 - tap) * features + feature) * channels + channel];
  }

  // Where the shortcut's entry for a channel that it projects lies.
  __device__ int64_t straight(int extra, int feature) const { return static_cast<int64_t>(extra) * features + feature; }
  __device__ int64_t turned(int extra, int feature) const {
    return static_cast<int64_t>(feature) * (columns - 9 * channels) + extra;
  }

  // Activation `feature` to `feature` + 7 of a column; not for a flipped kernel.
  template <class T>
  __device__ void load_features(int column, int feature, Eight<T>& out) const {
    out.clear();
    if (vectors && column < columns && feature < features) {
      const int extra = column - 9 * channels;
      const auto* from = static_cast<const T*>(extra < 0 ? kernel : shortcut);
      out.load(from + static_cast<int64_t>(extra < 0 ? column : extra) * features + feature);
    } else if (!vectors) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out.at[i] = entry<T>(column, feature + i);
    }
  }

  // Columns `column` to `column` + 7 of a feature, of a flipped kernel.
  template <class T>
  __device__ void load_columns(int column, int feature, Eight<T>& out) const {
    const int extra = column - 9 * channels;
    if (vectors && column < columns && feature < features) {
      if (extra >= 0) {
        out.load(static_cast<const T*>(shortcut) + turned(extra, feature));
        return;
      }
      const int tap = column / channels;
      out.load(static_cast<const T*>(kernel) + (static_cast<int64_t>(8 - tap) * features + feature) * channels +
               column - tap * channels);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out.at[i] = entry<T>(column + i, feature);
  }
};

// `extra`: what a shortcut projects.
template <class Plan>
Left left_of(const Plan& plan, const Parts& extra) {
  Left left{};
  left.x = channels_of(plan.x);
  left.pixels = static_cast<int>(plan.batch * plan.height * plan.width);
  left.height = static_cast<int>(plan.height);
  left.width = static_cast<int>(plan.width);
  left.extra = channels_of(extra);
  left.columns = 9 * left.x.total + left.extra.total;
  left.a = plan.a;
  left.b = plan.b;
  left.vectors = in_eights(left.x) && in_eights(left.extra);
  return left;
}

}  // namespace jaxunet::cuda
