// Tensor maps, which describe arrays, and the boxes of them that TMA copies.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "binding/plan.h"

namespace jaxunet::cuda {

// Encodes the map of an array of a 16-bit type. `dimensions`, `box` and `strides` count elements
// and begin with the innermost dimension, whose size is a multiple of 8. The innermost dimension of
// the box is 32 or 64 elements: a row of 64 or 128 bytes in shared memory, with the swizzle of that
// width. `strides` has the stride of each dimension but the innermost; if empty, the array is
// dense.
//
// Errors: cudaErrorSymbolNotFound if the driver lacks cuTensorMapEncodeTiled, cudaErrorInvalidValue
// if that function fails.
cudaError_t tensor_map(CUtensorMap* map, Type type, const void* data,
                       std::initializer_list<int64_t> dimensions, std::initializer_list<int> box,
                       std::initializer_list<int64_t> strides = {});

// Encodes the map of NHWC images. The layout of a box in shared memory is
// [batch][height][width][channels], or if packed, with the samples of a pixel side by side,
// [height][width][batch][channels].
struct Nhwc {
  int64_t batch, height, width, channels;
};
struct NhwcBox {
  int batch, height, width, channels;
};
inline cudaError_t image_map(CUtensorMap* map, Type type, const void* data, const Nhwc& image,
                             const NhwcBox& box, bool packed) {
  if (!packed) {
    return tensor_map(map, type, data, {image.channels, image.width, image.height, image.batch},
                      {box.channels, box.width, box.height, box.batch});
  }
  return tensor_map(
      map, type, data, {image.channels, image.batch, image.width, image.height},
      {box.channels, box.batch, box.width, box.height},
      {image.height * image.width * image.channels, image.channels, image.width * image.channels});
}

}  // namespace jaxunet::cuda
