// What the GroupNorm kernels share: a block owns all pixels of some channels of a sample, whole groups of them, and
// walks over them twice: to reduce, then to write. What it read first stays in shared memory where it fits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "plan.h"

namespace jaxunet::cuda {

// 16 bytes of neighbouring channels, or one channel where some part's channels are not a multiple of that.
template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  T values[V];
};

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void narrow(float x, float* to) { *to = x; }
__device__ inline void narrow(float x, __half* to) { *to = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

// Rounding to 16 bits hides what the quick exponential and division lose.
template <class T>
__device__ float sigmoid(float z) {
  if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-z));
  return 1.0f / (1.0f + expf(-z));
}

// How the threads of a block share its channels and pixels: a warp takes `rows` pixels, `lanes` vectors of each;
// several warps share a pixel where it has more than 32 vectors.
struct Slab {
  int pixels, channels, group;  // channels: of all parts
  int vectors;                  // of a pixel in a block
  int lanes, rows, tiles;       // vectors and pixels of a warp; warps of a pixel
  int steps, held;              // pixels of a thread; of which this many stay in shared memory
};

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

// A thread's column of vectors.
template <class T, int V>
struct Place {
  int channel, local;  // first channel, among all and among the block's
  int row, stride;     // first pixel, and how far it is to the next
  bool active;

  __device__ Place(const Slab& slab) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int vector = warp % slab.tiles * 32 + lane % slab.lanes;
    local = vector * V;
    channel = blockIdx.x * slab.vectors * V + local;
    row = warp / slab.tiles * slab.rows + lane / slab.lanes;
    stride = static_cast<int>(blockDim.x) / 32 / slab.tiles * slab.rows;
    active = lane / slab.lanes < slab.rows && vector < slab.vectors && channel < slab.channels;
  }
};

// Where a channel of a sample starts in the part that has it; pixels lie `width` elements apart.
template <class T>
__device__ T* column(const Sources& from, int channel, int64_t sample, int pixels, int* width) {
  int first = 0, part = 0;
  while (part + 1 < from.count && channel >= first + from.channels[part]) first += from.channels[part++];
  *width = from.channels[part];
  return reinterpret_cast<T*>(from.data[part]) + sample * pixels * *width + (channel - first);
}

template <int V>
__device__ void load_row(const Rows& rows, int64_t sample, int channel, float (&to)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) to[i] = rows.data[sample * rows.stride + channel + i];
}

// Warps of a block that have different pixels.
__device__ inline int row_warps(const Slab& slab) { return static_cast<int>(blockDim.x) / 32 / slab.tiles; }

// The largest step of a tree over the rows of a warp.
__device__ inline int half_rows(const Slab& slab) { return slab.rows > 1 ? 1 << (31 - __clz(slab.rows - 1)) : 0; }

inline bool whole_vectors(const Parts& parts, int64_t vector) {
  return std::all_of(parts.channels.begin(), parts.channels.begin() + parts.count,
                     [&](int64_t channels) { return channels % vector == 0; });
}

// What the launches need to know of the device.
struct Device {
  int processors = 0, shared = 0;
};

inline cudaError_t describe(Device* device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device->processors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  }
  return error;
}

// A launch: its slab, and how many arrays of it are held in shared memory.
struct Shape {
  Slab slab;
  int threads, blocks, held_arrays;
  size_t shared;
};

// Blocks own the fewest channels that make whole groups and whole 32-byte sectors, more where there are blocks enough.
// `small` is what a block needs in shared memory for each of its channels and row of warps, in bytes.
inline Shape shape(const Device& device, int64_t batch, int64_t pixels, int64_t channels, int64_t group, int vector,
                   int element, int arrays, int most_threads, int small) {
  const int unit = static_cast<int>(std::lcm<int64_t>(group, vector));
  const int64_t blocks_wanted = 2 * device.processors;
  int64_t own = unit;
  while (own < channels && own * element < 32) own += unit;
  while (own * 2 <= channels && own * element < 128 && batch * (channels / (own * 2)) >= blocks_wanted &&
         pixels * own * element <= 32768) {
    own *= 2;
  }
  own = std::min<int64_t>(own, (channels + unit - 1) / unit * unit);
  Shape found{};
  Slab& slab = found.slab;
  slab.pixels = static_cast<int>(pixels);
  slab.channels = static_cast<int>(channels);
  slab.group = static_cast<int>(group);
  slab.vectors = static_cast<int>(own / vector);
  slab.lanes = std::min(slab.vectors, 32);
  slab.rows = 32 / slab.lanes;
  slab.tiles = (slab.vectors + 31) / 32;
  // About four vectors a thread at least; a pixel's warps stay together.
  const int64_t wished = std::max<int64_t>(pixels * slab.vectors / 4 / 32, 4);
  const int rows_of_warps =
      static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(std::min<int64_t>(wished, most_threads / 32) / slab.tiles,
                                                              (pixels + slab.rows - 1) / slab.rows)));
  found.threads = 32 * slab.tiles * rows_of_warps;
  found.blocks = static_cast<int>((channels + own - 1) / own);
  const int stride = rows_of_warps * slab.rows;
  slab.steps = static_cast<int>((pixels + stride - 1) / stride);
  found.shared = static_cast<size_t>(small) * own * (rows_of_warps + 1);
  const size_t step = static_cast<size_t>(found.threads) * vector * element;
  const size_t room = found.shared < static_cast<size_t>(device.shared) ? device.shared - found.shared : 0;
  for (int n = arrays; n > 0 && !found.held_arrays; --n) {
    if (step * slab.steps * n <= room) found.held_arrays = n;
  }
  // Part of one array is better than nothing.
  slab.held = found.held_arrays ? slab.steps : static_cast<int>(room / step);
  if (!found.held_arrays && slab.held) found.held_arrays = 1;
  found.shared += step * slab.held * found.held_arrays;
  return found;
}

template <class Plan>
cudaError_t launch(void (*kernel)(Plan), const Shape& how, int64_t batch, const Plan& plan, cudaStream_t stream) {
  const auto shared = static_cast<int>(how.shared);
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(static_cast<unsigned>(how.blocks), static_cast<unsigned>(batch));
  kernel<<<grid, static_cast<unsigned>(how.threads), how.shared, stream>>>(plan);
  return cudaGetLastError();
}

}  // namespace jaxunet::cuda
