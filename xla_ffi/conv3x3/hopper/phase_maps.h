// Tensor maps of the four phases (phases.h) of a large image: every second row and column.
#pragma once

#include "common/tensor_map.h"
#include "conv3x3/hopper/phases.h"

namespace jaxunet::cuda {

// `small`: the dimensions of one phase. `box`: a strip of it.
inline cudaError_t phase_maps(CUtensorMap* maps, Type type, const void* large, const Nhwc& small,
                              const NhwcBox& box, bool packed) {
  constexpr int kElementBytes = 2;
  const int64_t column = 2 * small.channels, row = 2 * column * small.width,
                sample = row * small.height;
  for (int phase = 0; phase < kPhases; ++phase) {
    const int64_t first = phase / 2 * (row / 2) + phase % 2 * small.channels;
    const void* data = static_cast<const char*>(large) + first * kElementBytes;
    const cudaError_t error =
        packed
            ? tensor_map(&maps[phase], type, data,
                         {small.channels, small.batch, small.width, small.height},
                         {box.channels, box.batch, box.width, box.height}, {sample, column, row})
            : tensor_map(&maps[phase], type, data,
                         {small.channels, small.width, small.height, small.batch},
                         {box.channels, box.width, box.height, box.batch}, {column, row, sample});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxunet::cuda
