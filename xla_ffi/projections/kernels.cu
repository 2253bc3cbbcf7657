// Linear layers that read the same vectors in one launch, and their gradients in two (formulas in
// plan.h).
//
// Every product is made of blocks of 64 × 64 outputs, four warps of 32 × 32 each, on mma.sync
// (common/warp_tile.cuh). The layers are in the kernel's parameter: blockIdx.y is the layer,
// blockIdx.x its block; small layers leave blocks without work. A block loads kDepths tiles of 32
// steps of K of both matrices at once, through registers, where dy is converted from float32. The
// products have few steps of K, so the time is mostly that of these loads.
//
//   result     A              B                  M, N, K
//   y          x   K-major    kernel   MN-major  batch, features, width
//   dkernel    x   MN-major   dy       MN-major  width, features, batch
//   partial    dy  K-major    kernel   K-major   batch, width, features
//
// Shared memory: kDepths tiles of A, then as many of B. Barriers: one after the tiles are written,
// one before they are overwritten. All sums are in a fixed order. kAligned: the rows of all
// matrices are multiples of 16 bytes; a launch without it loads single elements.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/dispatch_dtype.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "common/types.cuh"
#include "common/warp_tile.cuh"
#include "projections/kernels.h"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLayers = 64;  // most layers of a launch; they take 2.5 KB of the kernel's parameter
// Tiles of each matrix in shared memory: 40 KB in all.
template <class T>
constexpr int kDepths = sizeof(T) == 2 ? 4 : 2;
template <class T>
constexpr int kShared = 2 * kDepths<T> * kTileEntries<T>;

// Adjacent elements that a thread loads at once: 16 bytes.
template <class Element>
constexpr int kVector = 16 / sizeof(Element);

// A row-major matrix in global memory, zero beyond its rows and columns. kMnMajor: its rows are
// steps of K.
template <bool kMnMajor, class Element>
struct Matrix {
  const Element* data;
  int rows, columns;

  // Returns the 16 bytes from a row and column on.
  template <bool kAligned>
  __device__ uint4 load(int row, int column) const {
    uint4 found{};
    if (row >= rows || column >= columns) return found;
    const Element* const from = data + static_cast<long long>(row) * columns + column;
    if constexpr (kAligned) {
      found = *reinterpret_cast<const uint4*>(from);
    } else {
      Element elements[kVector<Element>]{};
#pragma unroll
      for (int i = 0; i < kVector<Element>; ++i)
        if (column + i < columns) elements[i] = from[i];
      memcpy(&found, elements, sizeof(found));
    }
    return found;
  }
};

// A thread's share of kDepths tiles of a matrix.
template <class T, bool kMnMajor, class Element>
struct Share {
  static constexpr int kColumns = kMnMajor ? kTile : kDepth;  // of a tile
  static constexpr int kWidth = kVector<Element>;
  static constexpr int kVectors = kTile * kDepth / kWidth / kThreads;  // of a tile
  uint4 at[kDepths<T>][kVectors];

  // The row and column of a vector within its tile.
  __device__ static int row(int i) { return (i * kThreads + threadIdx.x) * kWidth / kColumns; }
  __device__ static int column(int i) { return (i * kThreads + threadIdx.x) * kWidth % kColumns; }

  // mn, k: the first row or column of the tiles, and their first step of K.
  template <bool kAligned>
  __device__ void load(const Matrix<kMnMajor, Element>& from, int mn, int k) {
#pragma unroll
    for (int depth = 0; depth < kDepths<T>; ++depth) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int first_k = k + depth * kDepth;
        at[depth][i] = from.template load<kAligned>((kMnMajor ? first_k : mn) + row(i),
                                                    (kMnMajor ? mn : first_k) + column(i));
      }
    }
  }
  __device__ void store(T* tiles) const {
#pragma unroll
    for (int depth = 0; depth < kDepths<T>; ++depth) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        T* const to = tiles + depth * kTileEntries<T> + row(i) * kStride<T, kMnMajor> + column(i);
        if constexpr (std::is_same_v<T, Element>) {
          *reinterpret_cast<uint4*>(to) = at[depth][i];
        } else {
          Element from[kWidth];
          memcpy(from, &at[depth][i], sizeof(from));
          AlignedArray<T, kWidth> converted;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) converted.at[j] = narrow<T>(wide(from[j]));
          *reinterpret_cast<AlignedArray<T, kWidth>*>(to) = converted;
        }
      }
    }
  }
};

// The warp's first row and column within its block's 64 × 64 outputs.
__device__ inline int warp_row() { return threadIdx.x / 64 * 32; }
__device__ inline int warp_column() { return threadIdx.x / 32 % 2 * 32; }

// Computes the block's outputs from row m and column n on. `tiles`: kShared<T> elements.
template <bool kAligned, class T, bool kLeftMnMajor, class Left, bool kRightMnMajor, class Right>
__device__ void multiply(Accumulator& accumulator, const Matrix<kLeftMnMajor, Left>& left,
                         const Matrix<kRightMnMajor, Right>& right, int m, int n, int steps,
                         T* tiles) {
  T* const right_tiles = tiles + kDepths<T> * kTileEntries<T>;
  for (int k = 0; k < steps; k += kDepths<T> * kDepth) {
    Share<T, kLeftMnMajor, Left> of_left;
    Share<T, kRightMnMajor, Right> of_right;
    of_left.template load<kAligned>(left, m, k);
    of_right.template load<kAligned>(right, n, k);
    if (k > 0) __syncthreads();
    of_left.store(tiles);
    of_right.store(right_tiles);
    __syncthreads();
#pragma unroll 1
    for (int depth = 0; depth < kDepths<T> && k + depth * kDepth < steps; ++depth) {
      multiply_tiles<kLeftMnMajor, kRightMnMajor>(accumulator, tiles + depth * kTileEntries<T>,
                                                  right_tiles + depth * kTileEntries<T>, warp_row(),
                                                  warp_column());
    }
  }
}

// Writes the block's outputs that are inside of a row-major matrix.
template <bool kAligned, class Element>
__device__ void write(const Accumulator& accumulator, int m, int n, int rows, int columns,
                      Element* to) {
  each_pair(
      accumulator, m + warp_row(), n + warp_column(),
      [&](int row, int column, float first, float second) {
        if (row >= rows || column >= columns) return;
        Element* const at = to + static_cast<long long>(row) * columns + column;
        const AlignedArray<Element, 2> both{{narrow<Element>(first), narrow<Element>(second)}};
        if constexpr (kAligned) {
          *reinterpret_cast<AlignedArray<Element, 2>*>(at) = both;
        } else {
          at[0] = both.at[0];
          if (column + 1 < columns) at[1] = both.at[1];
        }
      });
}

// One layer of a launch.
struct Layer {
  const void* kernel;
  const float* bias[kMaxBiases];
  float* y;
  int features;
};

struct Forward {
  const void* x;
  int batch, width;
  Layer layers[kLayers];
};

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    projections_kernel(const __grid_constant__ Forward call) {
  __shared__ alignas(16) T tiles[kShared<T>];
  const Layer& layer = call.layers[blockIdx.y];
  const int features = layer.features;
  const float *const first = layer.bias[0], *const second = layer.bias[1];
  float* const y = layer.y;
  if (!layer.kernel) {
    const int c = blockIdx.x * kThreads + threadIdx.x;
    if (c < features) y[c] = first[c] + (second ? second[c] : 0.0f);
    return;
  }
  const int columns = (features + kTile - 1) / kTile;
  const int m = static_cast<int>(blockIdx.x) / columns * kTile;
  const int n = static_cast<int>(blockIdx.x) % columns * kTile;
  if (m >= call.batch) return;
  // This lane's columns. They are loaded now and added last, so that nothing waits for them.
  float one[8], other[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int c = n + warp_column() + j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
    one[j] = c < features ? first[c] : 0.0f;
    other[j] = c < features && second ? second[c] : 0.0f;
  }
  const Matrix<false, T> x{static_cast<const T*>(call.x), call.batch, call.width};
  const Matrix<true, T> kernel{static_cast<const T*>(layer.kernel), call.width, features};
  Accumulator accumulator{};
  multiply<kAligned>(accumulator, x, kernel, m, n, call.width, tiles);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) accumulator[i / 2][j / 2][i % 2 * 2 + j % 2] += one[j] + other[j];
  }
  write<kAligned>(accumulator, m, n, call.batch, features, y);
}

// One layer of a launch.
struct LayerGradient {
  const void* kernel;
  const float* dy;
  void* dkernel;
  float* dbias;
  int features;
};

struct Backward {
  const void* x;
  int batch, width;
  float* partial;  // (layers of the launch, batch, width)
  LayerGradient layers[kLayers];
};

// dbias[c] = the sum of dy[..., c] for the 64 columns from n on; each half of the block adds every
// second sample.
__device__ void sum_samples(const LayerGradient& layer, int batch, int n, float* halves) {
  const int half = threadIdx.x / kTile, c = n + threadIdx.x % kTile;
  float sum = 0;
  if (c < layer.features) {
#pragma unroll 8
    for (int sample = half; sample < batch; sample += kThreads / kTile)
      sum += layer.dy[static_cast<long long>(sample) * layer.features + c];
  }
  __syncthreads();  // all warps have read their tiles
  if (half == 1) halves[threadIdx.x % kTile] = sum;
  __syncthreads();
  if (half == 0 && c < layer.features) layer.dbias[c] = sum + halves[threadIdx.x];
}

// The first blocks of a layer compute dkernel, the next ones `partial`.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    projection_gradients_kernel(const __grid_constant__ Backward call) {
  __shared__ alignas(16) T tiles[kShared<T>];
  const LayerGradient& layer = call.layers[blockIdx.y];
  const int features = layer.features, batch = call.batch, width = call.width;
  const int feature_tiles = (features + kTile - 1) / kTile,
            wide_tiles = (width + kTile - 1) / kTile;
  int block = blockIdx.x;
  Accumulator accumulator{};
  if (block < wide_tiles * feature_tiles) {
    const int m = block / feature_tiles * kTile, n = block % feature_tiles * kTile;
    const Matrix<true, T> x{static_cast<const T*>(call.x), batch, width};
    const Matrix<true, float> dy{layer.dy, batch, features};
    multiply<kAligned>(accumulator, x, dy, m, n, batch, tiles);
    write<kAligned>(accumulator, m, n, width, features, static_cast<T*>(layer.dkernel));
    if (m == 0) sum_samples(layer, batch, n, reinterpret_cast<float*>(tiles));
    return;
  }
  block -= wide_tiles * feature_tiles;
  const int m = block / wide_tiles * kTile, n = block % wide_tiles * kTile;
  if (m >= batch) return;
  const Matrix<false, float> dy{layer.dy, batch, features};
  const Matrix<false, T> kernel{static_cast<const T*>(layer.kernel), width, features};
  multiply<kAligned>(accumulator, dy, kernel, m, n, features, tiles);
  write<kAligned>(accumulator, m, n, batch, width,
                  call.partial + static_cast<long long>(blockIdx.y) * batch * width);
}

// dx = the sum of `partial` over the layers.
template <class T>
__global__ void __launch_bounds__(kThreads)
    projection_inputs_kernel(const float* partial, int layers, int elements, T* dx) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= elements) return;
  float sum = 0;
#pragma unroll 8
  for (int layer = 0; layer < layers; ++layer)
    sum += partial[static_cast<long long>(layer) * elements + i];
  dx[i] = narrow<T>(sum);
}

// Calls run(call, grid, first layer) for as many layers at a time as a launch takes. `shared` is
// the call without layers; convert(layer) and blocks(layer) give a layer's entry and blocks.
template <class Call, class Plan, class Convert, class Blocks, class Run>
cudaError_t launch_all(const Plan& plan, Call shared, const Convert& convert, const Blocks& blocks,
                       const Run& run) {
  shared.x = plan.x;
  shared.batch = static_cast<int>(plan.batch);
  shared.width = static_cast<int>(plan.width);
  for (size_t first = 0; first < plan.layers.size(); first += kLayers) {
    const size_t count = std::min(plan.layers.size() - first, static_cast<size_t>(kLayers));
    int64_t most = 0;
    for (size_t i = 0; i < count; ++i) {
      shared.layers[i] = convert(plan.layers[first + i]);
      most = std::max(most, blocks(plan.layers[first + i]));
    }
    if (most == 0) continue;
    const dim3 grid(static_cast<unsigned>(most), static_cast<unsigned>(count));
    const cudaError_t error = run(shared, grid, first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// True if the rows of all matrices of a call are multiples of 16 bytes.
template <class T, class Plan>
bool aligned(const Plan& plan) {
  const auto fits = [](const auto& layer) { return layer.features % kVector<T> == 0; };
  return plan.width % kVector<T> == 0 && std::all_of(plan.layers.begin(), plan.layers.end(), fits);
}

}  // namespace

cudaError_t projections(const Projections& plan, cudaStream_t stream, KernelSet) {
  const auto convert = [](const Projection& from) {
    return Layer{
        from.kernel, {from.biases[0], from.biases[1]}, from.y, static_cast<int>(from.features)};
  };
  const auto blocks = [&](const Projection& layer) {
    return layer.kernel ? ceil_div(plan.batch, kTile) * ceil_div(layer.features, kTile)
                        : ceil_div(layer.features, kThreads);
  };
  return dispatch_dtype(plan.type, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel =
        aligned<T>(plan) ? projections_kernel<T, true> : projections_kernel<T, false>;
    return launch_all(plan, Forward{}, convert, blocks,
                      [&](const Forward& call, dim3 grid, size_t) {
                        return launch(kernel, grid, kThreads, 0, stream, call);
                      });
  });
}

cudaError_t projection_gradients(const ProjectionGradients& plan, cudaStream_t stream, KernelSet) {
  const int64_t elements = plan.batch * plan.width;
  const auto convert = [](const ProjectionGradient& from) {
    return LayerGradient{from.kernel, from.dy, from.dkernel, from.dbias,
                         static_cast<int>(from.features)};
  };
  const auto blocks = [&](const ProjectionGradient& layer) {
    return ceil_div(plan.width, kTile) *
           (ceil_div(layer.features, kTile) + ceil_div(plan.batch, kTile));
  };
  return dispatch_dtype(plan.type, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = aligned<T>(plan) ? projection_gradients_kernel<T, true>
                                         : projection_gradients_kernel<T, false>;
    const auto run = [&](Backward& call, dim3 grid, size_t first) {
      call.partial = plan.partial + static_cast<int64_t>(first) * elements;
      return launch(kernel, grid, kThreads, 0, stream, call);
    };
    const cudaError_t error = launch_all(plan, Backward{}, convert, blocks, run);
    if (error != cudaSuccess || elements == 0) return error;
    return launch(projection_inputs_kernel<T>, static_cast<unsigned>(ceil_div(elements, kThreads)),
                  kThreads, 0, stream, plan.partial, static_cast<int>(plan.layers.size()),
                  static_cast<int>(elements), static_cast<T*>(plan.dx));
  });
}

}  // namespace jaxunet::cuda
