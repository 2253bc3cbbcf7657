// The parts of backward_streaming.cu: the kernels' parameters; the pipelines through which they
// read x, dy and the added tensors; z and its derivative; and what dx subtracts for each group.
#pragma once

#include "dropout.cuh"
#include "gradient.cuh"
#include "launch.h"
#include "streaming.cuh"

namespace jaxunet::cuda {

// The kernels' parameters.
struct Gradient {
  StreamingTiling tiling;
  GradientOperands operands;
  ParameterGradients parameters;
  int reduce_layers;  // grid layers, 0 or 1, that reduce the gradients of scale and offset
  Dropout dropout;
};

// Steps in flight per tensor. To refit, time both kernels with half and with twice as many.
constexpr int kStages = 4;

// The pipelines of x, dy and the kAdded tensors that are added to dx. With kAdded > 0, each `read`
// must be followed by an `add`. The added tensors have the layout of x, so each is at a constant
// distance from x's iterator.
template <class T, int V, int kAdded = 0>
struct Pipelines {
  using One = Pipeline<T, V, kStages>;
  static constexpr int64_t kBytes = (2 + kAdded) * One::kBytes;
  One x, dy;
  int64_t distance[kMaxAdded];  // bytes to the added tensors from the iterator of x, which is one
                                // step ahead

  __device__ Pipelines(const Gradient& g, const StreamingTile& tile, int64_t sample)
      : x(VectorIterator<T, V>(g.tiling, tile, g.operands.x, sample), dynamic_smem()),
        dy(VectorIterator<T, V>(g.tiling, tile, g.operands.dy, sample),
           dynamic_smem() + One::kBytes) {
#pragma unroll
    for (int k = 0; k < kAdded; ++k) {
      const auto* const added =
          VectorIterator<T, V>(g.tiling, tile, g.operands.added[k], sample).at;
      distance[k] = reinterpret_cast<const char*>(added) -
                    reinterpret_cast<const char*>(x.from.at + x.from.stride);
    }
#pragma unroll 1
    for (int step = 0; step < kStages; ++step) {
      fetch(tile, step);
      if constexpr (kAdded > 0) fetch_added(tile, step);
    }
  }
  // Waits for `step`, reads its x, and its dy with dropout applied, and starts to copy the step
  // that reuses its stage. The hash is computed before the wait.
  template <bool kDrops>
  __device__ void read(const Gradient& g, const StreamingTile& tile,
                       const SampleDropout<T, V, kDrops>& dropout, int step, float (&value)[V],
                       float (&dz)[V]) {
    const uint32_t dropped = dropout.bits(
        dropout.position(tile.pixel + step * tile.stride, g.tiling.channels, tile.channel));
    cp_async_wait<kStages - 1>();
    x.read(step, value);
    Vector<T, V> here = *dy.slot(step);
    dropout.scale(here.values);
    here.to_floats(dz);
    dropout.drop(dropped, dz);
    fetch(tile, step + kStages);
  }
  // Adds the added tensors of `step` to value.
  __device__ void add(const StreamingTile& tile, int step, float (&value)[V]) {
    if constexpr (kAdded > 0) {
#pragma unroll
      for (int k = 0; k < kAdded; ++k) {
        float more[V];
        const Vector<T, V> here = *slot(k, step);
        here.to_floats(more);
#pragma unroll
        for (int j = 0; j < V; ++j) value[j] += more[j];
      }
      fetch_added(tile, step + kStages);
    }
  }

  // The scratch memory behind the pipelines, aligned for float4.
  __device__ static float4* scratch() { return reinterpret_cast<float4*>(dynamic_smem() + kBytes); }

 private:
  __device__ Vector<T, V>* slot(int k, int step) const {
    return x.slot(step) + (2 + k) * kStages * kStreamingThreads;
  }
  __device__ void fetch(const StreamingTile& tile, int step) {
    if (step < tile.steps) {
      x.fetch(step);
      dy.fetch(step);
    }
    if constexpr (kAdded == 0) cp_async_commit();
  }
  // Call after `fetch` of the same step: this commits the step's group of copies.
  __device__ void fetch_added(const StreamingTile& tile, int step) {
    if (step < tile.steps) {
#pragma unroll
      for (int k = 0; k < kAdded; ++k) {
        const char* const from = reinterpret_cast<const char*>(x.from.at) + distance[k];
        if constexpr (V * sizeof(T) == 16) {
          cp_async_16(slot(k, step), from);
        } else {
          *slot(k, step) = *reinterpret_cast<const Vector<T, V>*>(from);
        }
      }
    }
    cp_async_commit();
  }
};

// The normalisation of a thread's channels; zeros if the thread has no pixels.
template <class T, int V>
__device__ ChannelAffine<T, V> affine_of(const Gradient& g, const StreamingTile& tile,
                                         int64_t sample) {
  ChannelAffine<T, V> norm;
  if (tile.steps > 0) {
    norm.load(channel_entry(g.operands.scale, sample, tile.channel),
              channel_entry(g.operands.offset, sample, tile.channel),
              channel_entry(g.operands.mean, sample, tile.channel),
              channel_entry(g.operands.inverse, sample, tile.channel));
  }
  return norm;
}

// Replaces dy, passed in `dz`, by dz, and writes act(z) to `active`.
template <class T, int V>
__device__ void differentiate(const ChannelAffine<T, V>& norm, Act act, const float (&value)[V],
                              float (&dz)[V], float (&active)[V]) {
  if (kFastSilu<T> && act == Act::kFastSilu) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float half = 0.5f * norm.at(value, j), t = fast_tanh(half), s = 0.5f + 0.5f * t;
      active[j] = half + half * t;
      dz[j] *= s + active[j] * (1.0f - s);
    }
  } else if (act == Act::kSilu) {
#pragma unroll
    for (int j = 0; j < V; ++j) dz[j] = silu_gradient<T>(dz[j], norm.at(value, j), &active[j]);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) active[j] = norm.at(value, j);
  }
}

// Adds up the gradients of scale and offset over the batch; the blocks of one grid layer divide the
// channels among them.
__device__ inline void reduce_over_batch(const Gradient& g) {
  static_assert(kReduceChannels * kReduceSlices == kStreamingThreads, "all threads reduce");
  const StreamingTiling& tiling = g.tiling;
  const int tiles = (tiling.channels + kReduceChannels - 1) / kReduceChannels;
  const int blocks = tiling.ranks * tiling.channel_blocks;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.y) * tiling.ranks + static_cast<int>(blockIdx.x);
       i < 2 * tiles; i += blocks) {
    reduce_parameter_gradients<kReduceSlices>(g.parameters, i >> 1, i & 1);
    __syncthreads();
  }
}

// What dx subtracts for each channel's group: constant + value * slope. All arrays are [channels]
// in scratch memory.
struct GroupTerms {
  float *dz_products, *product_products;  // scale times the sample's sums of dz and of dz * n
  float *constants, *slopes;  // until finish(): inverse and mean, which the same thread reads again

  __device__ GroupTerms(float* memory, int block_channels)
      : dz_products(memory),
        product_products(memory + block_channels),
        constants(product_products + block_channels),
        slopes(constants + block_channels) {}
  // The caller synchronises the block between load and finish.
  __device__ void load(const Gradient& g, int sample, int first_channel, int block_channels) const {
    const int channels = g.tiling.channels;
    const float* const sums =
        g.operands.sums + 2 * static_cast<int64_t>(sample) * channels + first_channel;
#pragma unroll 1
    for (int c = threadIdx.x; c < block_channels; c += kStreamingThreads) {
      const float scale = *channel_entry(g.operands.scale, sample, first_channel + c);
      dz_products[c] = scale * sums[c];
      product_products[c] = scale * sums[channels + c];
      constants[c] = *channel_entry(g.operands.inverse, sample, first_channel + c);
      slopes[c] = *channel_entry(g.operands.mean, sample, first_channel + c);
    }
  }
  template <class T>
  __device__ void finish(const StreamingTiling& tiling, int block_channels) const {
#pragma unroll 1
    for (int c = threadIdx.x; c < block_channels; c += kStreamingThreads) {
      const int group = c / tiling.group * tiling.group;
      float constant = 0, slope = 0;
#pragma unroll 4
      for (int i = 0; i < tiling.group; ++i) {
        constant += dz_products[group + i];
        slope += product_products[group + i];
      }
      const float inverse = constants[c], mean = slopes[c];
      const float share =
          inverse / (static_cast<float>(tiling.group) * static_cast<float>(tiling.pixels));
      constant *= share;
      slope *= share * inverse;
      if constexpr (!kUsesPivot<T>) constant -= mean * slope;
      constants[c] = constant;
      slopes[c] = slope;
    }
  }
};

}  // namespace jaxunet::cuda
