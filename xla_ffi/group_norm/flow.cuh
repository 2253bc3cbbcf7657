// What the kernels of a flow share: where a thread's vectors lie, and their way through shared memory.
#pragma once

#include "block.cuh"
#include "flow.h"

namespace jaxunet::cuda {

// float32 numbers are taken from a pivot, so that a large mean costs no bits. 16-bit numbers hold at most a few hundred
// deviations in their mean: one multiply-add from nought loses nothing.
template <class T>
constexpr bool kPivot = sizeof(T) == 4;

// A thread's place. Ranks take the rows of pixels in turns, so that all blocks together go through the image.
struct Spot {
  int row, local, channel;  // row of the block; first channel, counted from the block's first, and from the sample's
  int pixel, stride;        // first pixel, and the distance to the next
  int steps;                // pixels

  __device__ Spot(const Flow& flow, int vector) {
    row = static_cast<int>(threadIdx.x) / flow.vectors;
    local = (static_cast<int>(threadIdx.x) - row * flow.vectors) * vector;
    channel = static_cast<int>(blockIdx.y) * flow.vectors * vector + local;
    pixel = static_cast<int>(blockIdx.x) * flow.rows + row;
    stride = flow.rows * flow.ranks;
    steps = row < flow.rows && pixel < flow.pixels ? (flow.pixels - 1 - pixel) / stride + 1 : 0;
  }
  // The same pixels, counted from the last of the image.
  __device__ void turn(const Flow& flow) {
    pixel = flow.pixels - 1 - pixel;
    stride = -stride;
  }
};

// A thread's vectors of one tensor, one after the other.
template <class T, int V>
struct Walk {
  T* at = nullptr;
  int64_t stride = 0;  // elements from one to the next

  __device__ Walk(const Flow& flow, const Spot& spot, const Sources& of, int64_t sample) {
    if (spot.steps == 0) return;
    int width;
    T* const image = column<T>(of, spot.channel, sample, flow.pixels, &width);
    at = image + static_cast<int64_t>(spot.pixel) * width;
    stride = static_cast<int64_t>(spot.stride) * width;
  }
  // A tensor of all channels.
  __device__ Walk(const Flow& flow, const Spot& spot, void* of, int64_t sample) {
    if (spot.steps == 0) return;
    at = static_cast<T*>(of) + (sample * flow.pixels + spot.pixel) * flow.channels + spot.channel;
    stride = static_cast<int64_t>(spot.stride) * flow.channels;
  }
  __device__ Vector<T, V>* next() {
    auto* const here = reinterpret_cast<Vector<T, V>*>(at);
    at += stride;
    return here;
  }
};

// The vectors on their way: kAhead steps of the thread, in its own slots of shared memory, so that no barrier is
// needed.
template <class T, int V, int kAhead>
struct Pipe {
  static constexpr int64_t kBytes = static_cast<int64_t>(kAhead) * kFlowThreads * V * sizeof(T);  // of a block
  Walk<T, V> from;
  Vector<T, V>* slots;

  __device__ Pipe(const Walk<T, V>& from, char* memory)
      : from(from), slots(reinterpret_cast<Vector<T, V>*>(memory) + threadIdx.x) {}
  __device__ Vector<T, V>* slot(int step) const { return slots + (step & (kAhead - 1)) * kFlowThreads; }
  __device__ void fetch(int step) {
    if constexpr (V * sizeof(T) == 16) {
      copy16(slot(step), from.next());
    } else {
      *slot(step) = *from.next();
    }
  }
  __device__ void get(int step, float (&to)[V]) const {
    const Vector<T, V> here = *slot(step);
    here.get(to);
  }
};

// What a normalisation does to the channels of a thread: z = value · factor + shift, where value is x, less its pivot
// for float32.
template <class T, int V>
struct Affine {
  float factor[V] = {}, shift[V] = {}, mean[kPivot<T> ? V : 1] = {};

  // Rows of the sample, from the thread's first channel.
  __device__ void load(const float* scale, const float* offset, const float* means, const float* inverses) {
    float inverse[V], middle[V];
    load_floats(scale, factor);
    load_floats(offset, shift);
    load_floats(means, middle);
    load_floats(inverses, inverse);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      factor[j] *= inverse[j];
      if constexpr (kPivot<T>) {
        mean[j] = middle[j];
      } else {
        shift[j] -= middle[j] * factor[j];
      }
    }
  }
  __device__ void centre(float (&value)[V]) const {
    if constexpr (kPivot<T>) {
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] -= mean[j];
    }
  }
  __device__ float at(const float (&value)[V], int j) const { return value[j] * factor[j] + shift[j]; }
};

__device__ inline const float* row_of(const Rows& rows, int64_t sample, int channel) {
  return rows.data + sample * rows.stride + channel;
}

inline dim3 grid_of(const Flow& flow, int64_t samples) {
  return dim3(static_cast<unsigned>(flow.ranks), static_cast<unsigned>(flow.blocks), static_cast<unsigned>(samples));
}

template <class T>
Flow flow_of(const Limits& limits, const Parts& x, int64_t batch, int64_t pixels, int64_t groups, bool vectors) {
  return cut_flow(limits, kFlowNumbers, batch, pixels, x.total, x.total / groups, vectors ? 16 / sizeof(T) : 1,
                  sizeof(T));
}

}  // namespace jaxunet::cuda
