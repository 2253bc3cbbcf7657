// Descriptions of arrays for Hopper's copy engine (TMA).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "plan.h"

namespace jaxunet::cuda {

// An array of a 16-bit type, dimensions innermost first, copied in boxes of these sizes whose rows of 128 bytes are
// swizzled in shared memory. The innermost dimension is a multiple of 8. `strides`: elements from one entry to the next
// of every other dimension; not given, the array is dense in this order.
cudaError_t tensor_map(CUtensorMap* map, Type type, const void* data, std::initializer_list<int64_t> dimensions,
                       std::initializer_list<int> box, std::initializer_list<int64_t> strides = {});

// Images (batch, height, width, channels) with the samples of a pixel side by side: the box is of channels, samples,
// columns and rows.
inline cudaError_t packed_images(CUtensorMap* map, Type type, const void* data, int64_t batch, int64_t height,
                                 int64_t width, int64_t channels, std::initializer_list<int> box) {
  return tensor_map(map, type, data, {channels, batch, width, height}, box,
                    {height * width * channels, channels, width * channels});
}

}  // namespace jaxunet::cuda
