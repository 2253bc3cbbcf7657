#include "common/tensor_map.h"

#include <algorithm>

namespace jaxunet::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// Looks up the driver's function at run time, because a module linked against libcuda does not load
// on a machine without a driver.
Encode encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr unsigned kVersion = 12000;  // CUDA 12.0, whose signature `Encode` declares
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kVersion, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Encode>(function)
             : nullptr;
}

}  // namespace

cudaError_t tensor_map(CUtensorMap* map, Type type, const void* data,
                       std::initializer_list<int64_t> dimensions, std::initializer_list<int> box,
                       std::initializer_list<int64_t> strides) {
  static const Encode encode = encode_function();
  if (!encode) return cudaErrorSymbolNotFound;
  constexpr int kMaxRank = 5, kBytes = 2;  // kBytes: per element
  cuuint64_t sizes[kMaxRank] = {}, byte_strides[kMaxRank] = {};
  cuuint32_t boxes[kMaxRank] = {}, element_steps[kMaxRank] = {};
  int rank = 0;
  cuuint64_t dense_stride = kBytes;
  for (const int64_t size : dimensions) {
    sizes[rank] = static_cast<cuuint64_t>(size);
    byte_strides[rank] = dense_stride *= sizes[rank];  // stride of dimension rank + 1
    element_steps[rank] = 1;
    ++rank;
  }
  std::transform(strides.begin(), strides.end(), byte_strides,
                 [](int64_t elements) { return static_cast<cuuint64_t>(elements) * kBytes; });
  std::transform(box.begin(), box.end(), boxes,
                 [](int elements) { return static_cast<cuuint32_t>(elements); });
  const auto element =
      type == Type::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle =
      boxes[0] * kBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result =
      encode(map, element, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes,
             byte_strides, boxes, element_steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxunet::cuda
