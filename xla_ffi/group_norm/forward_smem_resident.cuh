// The access of a smem_resident block's threads (smem_resident.h) to their vectors, in global
// memory and in the staged copies in shared memory.
#pragma once

#include "smem_resident.h"
#include "vector.cuh"

namespace jaxunet::cuda {

// The work of a thread: one vector of channels, and `steps` pixels, 1 << row_bits apart.
struct ThreadTile {
  int lane, warp_row;  // lane of the warp; which of the warps with the same channels
  int local;           // first channel of the vector, counted from the block's first
  int channel, pixel;  // first channel and first pixel, counted from the sample's first
  int steps;  // pixels of the thread; 0 if it has no channels, or its pixels lie beyond the block's
              // share
  bool present;        // the vector is one of the block's
  bool first_of_warp;  // this is the first lane of the warp with these channels

  __device__ ThreadTile(const SmemResidentTiling& tiling, int vector) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp_row = tiling.warp_columns == 1 ? warp : warp / tiling.warp_columns;
    const int lane_column = lane & ((1 << tiling.lane_bits) - 1);
    const int column = lane_column + 32 * (warp - warp_row * tiling.warp_columns);
    local = column * vector;
    channel = static_cast<int>(blockIdx.y) * tiling.vectors * vector + local;
    present = column < tiling.vectors;
    first_of_warp = present && lane == lane_column;
    const int row = (warp_row << (5 - tiling.lane_bits)) + (lane >> tiling.lane_bits);
    const int first = static_cast<int>(blockIdx.x) * tiling.block_pixels;
    const int end = min(first + tiling.block_pixels, tiling.pixels);
    pixel = first + row;
    const bool some = present && channel < tiling.channels && pixel < end;
    steps = some ? ((end - 1 - pixel) >> tiling.row_bits) + 1 : 0;
  }
};

// A thread's vectors of one tensor in global memory: at(step).
template <class T, int V>
struct ThreadVectors {
  T* first = nullptr;
  int64_t stride = 0;  // elements from one step to the next

  __device__ ThreadVectors(const SmemResidentTiling& tiling, const ThreadTile& tile,
                           const TensorParts& from) {
    if (tile.steps == 0) return;
    int pixel_stride;
    T* const image = find_channel<T>(from, tile.channel, blockIdx.z, tiling.pixels, &pixel_stride);
    first = image + static_cast<int64_t>(tile.pixel) * pixel_stride;
    stride = static_cast<int64_t>(pixel_stride) << tiling.row_bits;
  }
  // A tensor that has all channels in one array.
  __device__ ThreadVectors(const SmemResidentTiling& tiling, const ThreadTile& tile, void* from) {
    first = static_cast<T*>(from) +
            (static_cast<int64_t>(blockIdx.z) * tiling.pixels + tile.pixel) * tiling.channels +
            tile.channel;
    stride = static_cast<int64_t>(tiling.channels) << tiling.row_bits;
  }
  __device__ Vector<T, V>* at(int step) const {
    return reinterpret_cast<Vector<T, V>*>(first + step * stride);
  }
};

// The staged copies of a tensor in shared memory: kChunkStages stages of chunk_steps vectors for
// each thread. A thread reads only what it copied itself, so cp_async_wait suffices and no barrier
// is needed.
//
// Layout: slots[stage][step of the chunk][thread].
template <class T, int V>
struct ChunkStages {
  Vector<T, V>* slots;
  int chunk_steps;

  // The slot of step i of a chunk, in the stage that the chunk takes.
  __device__ Vector<T, V>* slot(int chunk, int i) const {
    return slots + ((chunk & (kChunkStages - 1)) * chunk_steps + i) * blockDim.x + threadIdx.x;
  }
  // Starts to copy the steps that the chunk has; none beyond `steps`.
  __device__ void fetch(const ThreadVectors<T, V>& from, int chunk, int steps) const {
    const int start = chunk * chunk_steps, end = min(start + chunk_steps, steps);
#pragma unroll 1
    for (int step = start; step < end; ++step) {
      if constexpr (V * sizeof(T) == 16) {
        cp_async_16(slot(chunk, step - start), from.at(step));
      } else {
        *slot(chunk, step - start) = *from.at(step);
      }
    }
  }
};

inline dim3 grid_of(const SmemResidentTiling& tiling, int64_t batch) {
  return dim3(static_cast<unsigned>(tiling.cluster_size),
              static_cast<unsigned>(tiling.channel_blocks), static_cast<unsigned>(batch));
}

}  // namespace jaxunet::cuda
