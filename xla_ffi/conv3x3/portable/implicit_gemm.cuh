// The convolution as an implicit GEMM, for every shape, type and GPU: Y = A · B, without storing
// the matrices A and B. The weight gradient is Aᵀ · dY.
//
// A has a row for each pixel of the batch and a column for each (tap, channel): column = tap ·
// channels + channel. A 1×1 shortcut adds a column for each projected channel, which reads the
// pixel itself; a linear layer has only these columns. B has a row for each column of A: it is the
// kernel (3, 3, channels, features) in its memory layout, followed by the shortcut (projected
// channels, features). Threads load eight adjacent entries at a time.
#pragma once

#include "common/types.cuh"
#include "conv3x3/channels.cuh"
#include "conv3x3/dispatch.h"

namespace jaxunet::cuda {

// A row of A.
struct Pixel {
  int64_t row;  // its index, for arrays seen as (batch · height · width, channels)
  int sample, y, x;
};

// The matrix A.
struct MatrixA {
  Channels x, projected;
  int pixels, height, width, columns;
  Rows a, b;     // SiLU(a · x + b); null data: no activation. Not in a weight gradient
  bool vectors;  // aligned groups of eight columns are contiguous in memory

  __device__ Pixel pixel(int index) const {
    const int line = index / width, sample = line / height;
    return {index, sample, line - sample * height, index - line * width};
  }

  // The activated entry of a channel, rounded to the type of x.
  template <class T>
  __device__ T activated(T value, int sample, int channel) const {
    if (!a.data) return value;
    return narrow<T>(silu_exact(a.data[sample * a.stride + channel] * wide(value) +
                                b.data[sample * b.stride + channel]));
  }

  // The address that `column` reads at a pixel; null in the padding and past the last column. Sets
  // `channel` to the channel of x, or to -1 for a projected channel, which has no activation.
  template <class T>
  __device__ const T* entry(const Pixel& pixel, int column, int* channel) const {
    const int tap = column < 9 * x.total ? column / x.total : 9, down = pixel.y + tap / 3 - 1,
              right = pixel.x + tap % 3 - 1;
    *channel = column - tap * x.total;
    if (tap >= 9) {
      *channel = -1;
      return column < columns ? projected.at<T>(pixel.row, column - 9 * x.total) : nullptr;
    }
    if (down < 0 || down >= height || right < 0 || right >= width) return nullptr;
    return x.at<T>(pixel.row + (down - pixel.y) * width + right - pixel.x, *channel);
  }

  // Columns `column` to `column` + 7 of row `index`; zeros past the last pixel.
  template <bool kActivated, class T>
  __device__ void load(int index, int column, Eight<T>& out) const {
    out.clear();
    if (index >= pixels) return;
    const Pixel here = pixel(index);
    int channel;
    if (vectors) {
      const T* from = entry<T>(here, column, &channel);
      if (!from) return;
      out.load(from);
      if constexpr (kActivated) {
        if (channel < 0 || !a.data) return;
#pragma unroll
        for (int i = 0; i < 8; ++i) out.at[i] = activated(out.at[i], here.sample, channel + i);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T* from = entry<T>(here, column + i, &channel);
      if (!from) continue;
      out.at[i] = !kActivated || channel < 0 ? *from : activated(*from, here.sample, channel);
    }
  }
};

// The matrix B of the forward convolution. A row of B is called `column`, after the column of A
// that it multiplies.
struct MatrixB {
  const void *kernel, *shortcut;
  int channels, features, columns;  // channels of x, features of y, columns of A
  // True if the kernel is stored as (3, 3, features, channels) and read as kernel[::-1, ::-1] with
  // its last two dimensions exchanged, and the shortcut is stored as (features, projected
  // channels).
  bool flipped;
  bool vectors;  // eight features (flipped: eight channels) are contiguous in memory

  // Zero past the last row and the last feature.
  template <class T>
  __device__ T entry(int column, int feature) const {
    if (column >= columns || feature >= features) return narrow<T>(0.0f);
    const int projected = column - 9 * channels;
    if (projected >= 0)
      return static_cast<const T*>(shortcut)[flipped ? flipped_shortcut_index(projected, feature)
                                                     : shortcut_index(projected, feature)];
    const int tap = column / channels, channel = column - tap * channels;
    if (!flipped)
      return static_cast<const T*>(kernel)[static_cast<int64_t>(column) * features + feature];
    return static_cast<const T*>(
        kernel)[(static_cast<int64_t>(8 - tap) * features + feature) * channels + channel];
  }

  // The index of the shortcut's entry for a projected channel, unflipped and flipped.
  __device__ int64_t shortcut_index(int projected, int feature) const {
    return static_cast<int64_t>(projected) * features + feature;
  }
  __device__ int64_t flipped_shortcut_index(int projected, int feature) const {
    return static_cast<int64_t>(feature) * (columns - 9 * channels) + projected;
  }

  // Loads features `feature` to `feature` + 7 of row `column`, for a kernel that is not flipped.
  template <class T>
  __device__ void load_features(int column, int feature, Eight<T>& out) const {
    out.clear();
    if (vectors && column < columns && feature < features) {
      const int projected = column - 9 * channels;
      const auto* from = static_cast<const T*>(projected < 0 ? kernel : shortcut);
      out.load(from + static_cast<int64_t>(projected < 0 ? column : projected) * features +
               feature);
    } else if (!vectors) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out.at[i] = entry<T>(column, feature + i);
    }
  }

  // Loads rows `column` to `column` + 7 of a feature, for a flipped kernel.
  template <class T>
  __device__ void load_columns(int column, int feature, Eight<T>& out) const {
    const int projected = column - 9 * channels;
    if (vectors && column < columns && feature < features) {
      if (projected >= 0) {
        out.load(static_cast<const T*>(shortcut) + flipped_shortcut_index(projected, feature));
        return;
      }
      const int tap = column / channels;
      out.load(static_cast<const T*>(kernel) +
               (static_cast<int64_t>(8 - tap) * features + feature) * channels + column -
               tap * channels);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out.at[i] = entry<T>(column + i, feature);
  }
};

// The matrix A of a plan, without activation.
template <class Plan>
MatrixA matrix_a(const Plan& plan) {
  MatrixA a{};
  a.x = channels_of(plan.x);
  a.pixels = static_cast<int>(plan.batch * plan.height * plan.width);
  a.height = static_cast<int>(plan.height);
  a.width = static_cast<int>(plan.width);
  a.projected = channels_of(plan.projected);
  a.columns = 9 * a.x.total + a.projected.total;
  a.vectors = in_eights(plan.x) && in_eights(plan.projected);
  return a;
}

}  // namespace jaxunet::cuda
