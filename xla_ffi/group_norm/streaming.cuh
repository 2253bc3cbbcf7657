// The threads of a streaming block (streaming_tiling.h): their pixels, their vectors in global
// memory, the shared-memory pipeline through which they read these, and the channels'
// normalisation.
#pragma once

#include "streaming_tiling.h"
#include "vector.cuh"

namespace jaxunet::cuda {

// The work of a thread: one vector of channels, and `steps` pixels, `stride` apart. The blocks of a
// sample take rows of pixels in turns, so that all of them together move through the image.
struct StreamingTile {
  int row;             // pixel of the block's first step
  int local, channel;  // first channel of the vector, counted from the block's first, and from the
                       // sample's
  int pixel, stride;   // first pixel, and the distance to the next
  int steps;           // pixels of the thread

  __device__ StreamingTile(const StreamingTiling& tiling, int vector) {
    row = static_cast<int>(threadIdx.x) / tiling.vectors;
    local = (static_cast<int>(threadIdx.x) - row * tiling.vectors) * vector;
    channel = static_cast<int>(blockIdx.y) * tiling.vectors * vector + local;
    pixel = static_cast<int>(blockIdx.x) * tiling.rows + row;
    stride = tiling.rows * tiling.ranks;
    steps =
        row < tiling.rows && pixel < tiling.pixels ? (tiling.pixels - 1 - pixel) / stride + 1 : 0;
  }
  // The same pixels in reverse order, from the last pixel of the image backwards.
  __device__ void reverse(const StreamingTiling& tiling) {
    pixel = tiling.pixels - 1 - pixel;
    stride = -stride;
  }
};

// Iterates over a thread's vectors of one tensor in global memory.
template <class T, int V>
struct VectorIterator {
  T* at = nullptr;
  int64_t stride = 0;  // elements from one vector to the next

  __device__ VectorIterator(const StreamingTiling& tiling, const StreamingTile& tile,
                            const TensorParts& of, int64_t sample) {
    if (tile.steps == 0) return;
    int pixel_stride;
    T* const image = find_channel<T>(of, tile.channel, sample, tiling.pixels, &pixel_stride);
    at = image + static_cast<int64_t>(tile.pixel) * pixel_stride;
    stride = static_cast<int64_t>(tile.stride) * pixel_stride;
  }
  // A tensor that has all channels in one array.
  __device__ VectorIterator(const StreamingTiling& tiling, const StreamingTile& tile, void* of,
                            int64_t sample) {
    if (tile.steps == 0) return;
    at = static_cast<T*>(of) + (sample * tiling.pixels + tile.pixel) * tiling.channels +
         tile.channel;
    stride = static_cast<int64_t>(tile.stride) * tiling.channels;
  }
  __device__ Vector<T, V>* next() {
    auto* const here = reinterpret_cast<Vector<T, V>*>(at);
    at += stride;
    return here;
  }
};

// A pipeline of kStages steps (a power of two) of one tensor in shared memory. A thread reads only
// its own copies, so cp_async_wait suffices and no barrier is needed. The caller commits one group
// per step.
//
// Layout: slots[stage][thread].
template <class T, int V, int kStages>
struct Pipeline {
  static constexpr int64_t kBytes =
      static_cast<int64_t>(kStages) * kStreamingThreads * V * sizeof(T);  // per block
  VectorIterator<T, V> from;
  Vector<T, V>* slots;

  __device__ Pipeline(const VectorIterator<T, V>& from, char* memory)
      : from(from), slots(reinterpret_cast<Vector<T, V>*>(memory) + threadIdx.x) {}
  __device__ Vector<T, V>* slot(int step) const {
    return slots + (step & (kStages - 1)) * kStreamingThreads;
  }
  // Starts to copy the next vector, which belongs to `step`.
  __device__ void fetch(int step) {
    if constexpr (V * sizeof(T) == 16) {
      cp_async_16(slot(step), from.next());
    } else {
      *slot(step) = *from.next();
    }
  }
  // Reads the vector of `step`, which must have arrived.
  __device__ void read(int step, float (&to)[V]) const {
    const Vector<T, V> here = *slot(step);
    here.to_floats(to);
  }
};

// The normalisation of a thread's channels as z = value * factor + shift, where value is x, or x -
// mean for float32.
template <class T, int V>
struct ChannelAffine {
  float factor[V] = {}, shift[V] = {}, mean[kUsesPivot<T> ? V : 1] = {};

  // Computes the coefficients from the sample's rows; each pointer is at the thread's first
  // channel.
  __device__ void load(const float* scale, const float* offset, const float* means,
                       const float* inverses) {
    float inverse[V], channel_mean[V];
    load_floats(scale, factor);
    load_floats(offset, shift);
    load_floats(means, channel_mean);
    load_floats(inverses, inverse);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      factor[j] *= inverse[j];
      if constexpr (kUsesPivot<T>) {
        mean[j] = channel_mean[j];
      } else {
        shift[j] -= channel_mean[j] * factor[j];
      }
    }
  }
  // Turns x into value.
  __device__ void centre(float (&value)[V]) const {
    if constexpr (kUsesPivot<T>) {
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] -= mean[j];
    }
  }
  // z of channel j.
  __device__ float at(const float (&value)[V], int j) const {
    return value[j] * factor[j] + shift[j];
  }
};

// The entry of a channel in the row of a sample.
__device__ inline const float* channel_entry(const Rows& rows, int64_t sample, int channel) {
  return rows.data + sample * rows.stride + channel;
}

inline dim3 grid_of(const StreamingTiling& tiling, int64_t layers) {
  return dim3(static_cast<unsigned>(tiling.ranks), static_cast<unsigned>(tiling.channel_blocks),
              static_cast<unsigned>(layers));
}

}  // namespace jaxunet::cuda
