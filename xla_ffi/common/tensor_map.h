// Tensor maps: the arrays and boxes that TMA copies.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "binding/plan.h"

namespace jaxunet::cuda {

// Encodes the map of an array of a 16-bit type. `dimensions`, `box` and `strides` count elements
// and begin with the innermost dimension, which is a multiple of 8. The innermost dimension of the
// box is 32 or 64 elements, a row of 64 or 128 bytes in shared memory, which is swizzled over its
// length. `strides`: from one element to the next of each dimension but the innermost; without it
// the array is dense.
//
// Errors: cudaErrorSymbolNotFound if the driver lacks cuTensorMapEncodeTiled, cudaErrorInvalidValue
// if it refuses.
cudaError_t tensor_map(CUtensorMap* map, Type type, const void* data,
                       std::initializer_list<int64_t> dimensions, std::initializer_list<int> box,
                       std::initializer_list<int64_t> strides = {});

// Encodes the map of NHWC images. A box lies in shared memory as [batch][height][width][channels];
// packed, the samples of a pixel are side by side: [height][width][batch][channels].
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
