// Descriptions of arrays for Hopper's copy engine (TMA).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "binding/plan.h"

namespace jaxunet::cuda {

// An array of a 16-bit type, dimensions innermost first, copied in boxes of these sizes whose rows of 128 bytes are
// swizzled in shared memory. The innermost dimension is a multiple of 8. `strides`: elements from one entry to the next
// of every other dimension; not given, the array is dense in this order.
cudaError_t tensor_map(CUtensorMap* map, Type type, const void* data, std::initializer_list<int64_t> dimensions,
                       std::initializer_list<int> box, std::initializer_list<int64_t> strides = {});

// Images and a box of them. The samples come last in shared memory; packed, those of a pixel are side by side.
struct Nhwc {
  int64_t batch, height, width, channels;
};
struct NhwcBox {
  int batch, height, width, channels;
};
inline cudaError_t image_map(CUtensorMap* map, Type type, const void* data, const Nhwc& of, const NhwcBox& box,
                             bool packed) {
  if (!packed) {
    return tensor_map(map, type, data, {of.channels, of.width, of.height, of.batch},
                      {box.channels, box.width, box.height, box.batch});
  }
  return tensor_map(map, type, data, {of.channels, of.batch, of.width, of.height},
                    {box.channels, box.batch, box.width, box.height},
                    {of.height * of.width * of.channels, of.channels, of.width * of.channels});
}

}  // namespace jaxunet::cuda
