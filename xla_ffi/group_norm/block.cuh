// What the GroupNorm kernels share: numbers, where a thread's vectors lie, and their way through shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "../special_functions.cuh"
#include "instructions.cuh"
#include "plan.h"
#include "slab.h"

namespace jaxunet::cuda {

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float2 wide(__half2 x) { return __half22float2(x); }
__device__ inline float2 wide(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline void narrow(float x, float* to) { *to = x; }
__device__ inline void narrow(float x, __half* to) { *to = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, float y, __half2* to) { *to = __floats2half2_rn(x, y); }
__device__ inline void narrow(float x, float y, __nv_bfloat162* to) { *to = __floats2bfloat162_rn(x, y); }

template <class T>
struct PairOf {};
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// 16 bytes of neighbouring channels, or one channel where some part's channels are not a multiple of that.
template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  static constexpr bool kPairs = sizeof(T) == 2 && V % 2 == 0;
  static constexpr int kVector = V;
  T values[V];

  __device__ void get(float (&to)[V]) const {
    if constexpr (kPairs) {
      const auto* const pairs = reinterpret_cast<const typename PairOf<T>::Type*>(values);
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        const float2 two = wide(pairs[i]);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) to[i] = wide(values[i]);
    }
  }
  __device__ void set(const float (&from)[V]) {
    if constexpr (kPairs) {
      auto* const pairs = reinterpret_cast<typename PairOf<T>::Type*>(values);
#pragma unroll
      for (int i = 0; i < V / 2; ++i) narrow(from[2 * i], from[2 * i + 1], &pairs[i]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) narrow(from[i], &values[i]);
    }
  }
};

// What nobody writes while the kernel runs: the compiler may read it before it writes something else.
template <class T, int V>
__device__ Vector<T, V> read_only(const Vector<T, V>* from) {
  Vector<T, V> found;
  if constexpr (V * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(found.values) = __ldg(reinterpret_cast<const uint4*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) found.values[i] = __ldg(from->values + i);
  }
  return found;
}

// Rounding to 16 bits hides what the quick exponential and reciprocal lose.
template <class T>
__device__ float sigmoid(float z) {
  if constexpr (sizeof(T) == 2) return reciprocal(1.0f + power_of_two(-1.44269504f * z));
  return 1.0f / (1.0f + expf(-z));
}

// The parts of a tensor, one after the other.
struct Sources {
  int count;
  char* data[kMaxParts];
  int channels[kMaxParts];
};

inline Sources sources(const Parts& parts) {
  Sources to{parts.count, {}, {}};
  for (int i = 0; i < parts.count; ++i) {
    to.data[i] = static_cast<char*>(parts.data[i]);
    to.channels[i] = static_cast<int>(parts.channels[i]);
  }
  return to;
}

// Where a channel of a sample starts in the part that has it; pixels lie `width` elements apart.
template <class T>
__device__ T* column(const Sources& from, int channel, int64_t sample, int pixels, int* width) {
  int first = 0, part = 0;
#pragma unroll 1
  while (part + 1 < from.count && channel >= first + from.channels[part]) first += from.channels[part++];
  *width = from.channels[part];
  return reinterpret_cast<T*>(from.data[part]) + sample * pixels * *width + (channel - first);
}

// A thread's place: blockIdx = (block of the cluster, channels, sample).
struct Place {
  int lane, warp_row;   // lane of the warp; which of the warps with the same channels
  int local;            // first channel, counted from the block's first
  int channel, pixel;   // first of both, in the sample
  int steps;            // pixels, each 1 << row_bits after the one before
  bool present, alone;  // whether these are channels of the block; and this the first lane of the warp that has them

  __device__ Place(const Slab& slab, int vector) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp_row = slab.tiles == 1 ? warp : warp / slab.tiles;
    const int column = lane & ((1 << slab.lane_bits) - 1), at = column + 32 * (warp - warp_row * slab.tiles);
    local = at * vector;
    channel = static_cast<int>(blockIdx.y) * slab.vectors * vector + local;
    present = at < slab.vectors;
    alone = present && lane == column;
    const int row = (warp_row << (5 - slab.lane_bits)) + (lane >> slab.lane_bits);
    const int first = static_cast<int>(blockIdx.x) * slab.share, end = min(first + slab.share, slab.pixels);
    pixel = first + row;
    const bool some = present && channel < slab.channels && pixel < end;
    steps = some ? ((end - 1 - pixel) >> slab.row_bits) + 1 : 0;
  }
};

// A thread's vectors of one tensor.
template <class T, int V>
struct Stream {
  T* first = nullptr;
  int64_t stride = 0;  // elements from one to the next

  __device__ Stream(const Slab& slab, const Place& place, const Sources& from) {
    if (place.steps == 0) return;
    int width;
    T* const image = column<T>(from, place.channel, blockIdx.z, slab.pixels, &width);
    first = image + static_cast<int64_t>(place.pixel) * width;
    stride = static_cast<int64_t>(width) << slab.row_bits;
  }
  // A tensor of all channels.
  __device__ Stream(const Slab& slab, const Place& place, void* from) {
    first = static_cast<T*>(from) + (static_cast<int64_t>(blockIdx.z) * slab.pixels + place.pixel) * slab.channels +
            place.channel;
    stride = static_cast<int64_t>(slab.channels) << slab.row_bits;
  }
  __device__ Vector<T, V>* at(int step) const { return reinterpret_cast<Vector<T, V>*>(first + step * stride); }
};

// The thread's own slots in shared memory: kRing chunks in turn, of `depth` vectors each. Nobody else reads them, so
// that no barrier is needed.
template <class T, int V>
struct Ring {
  Vector<T, V>* slots;
  int depth;

  __device__ Vector<T, V>* slot(int chunk, int i) const {
    return slots + ((chunk & (kRing - 1)) * depth + i) * blockDim.x + threadIdx.x;
  }
  // Starts to copy what there is of a chunk.
  __device__ void fetch(const Stream<T, V>& from, int chunk, int steps) const {
    const int start = chunk * depth, end = min(start + depth, steps);
#pragma unroll 1
    for (int step = start; step < end; ++step) {
      if constexpr (V * sizeof(T) == 16) {
        copy16(slot(chunk, step - start), from.at(step));
      } else {
        *slot(chunk, step - start) = *from.at(step);
      }
    }
  }
};

// The rows (channels) of this sample.
__device__ inline const float* of_sample(const Rows& rows) { return rows.data + blockIdx.z * rows.stride; }

// `from` is aligned as vectors of channels are.
template <int V>
__device__ void load_floats(const float* from, float (&to)[V]) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = from[i];
  }
}

inline bool whole_vectors(const Parts& parts, int64_t vector) {
  return std::all_of(parts.channels.begin(), parts.channels.begin() + parts.count,
                     [&](int64_t channels) { return channels % vector == 0; });
}

// Clusters are launched on compute capability 9.0 alone, whose code the build has.
inline cudaError_t describe(Limits* limits) {
  int id = 0, processors = 0, shared = 0, major = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  *limits = {processors, shared, major == 9 ? 8 : 1};
  return error;
}

inline dim3 grid_of(const Slab& slab, int64_t batch) {
  return dim3(static_cast<unsigned>(slab.ranks), static_cast<unsigned>(slab.blocks), static_cast<unsigned>(batch));
}

}  // namespace jaxunet::cuda
