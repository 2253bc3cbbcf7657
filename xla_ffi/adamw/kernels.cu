// AdamW, sums of squares, 16-bit copies and packing of many tensors in one launch (formulas in
// plan.h).
//
// The sizes and pointers of the tensors are passed in the kernel's parameter, TensorList, so that
// nothing is copied to the device. Each block processes one chunk of one tensor. It finds the
// tensor by bisection, because each entry has the number of its first block. Grid: all chunks of
// all tensors in a list; tensors that do not fit in one list take another launch. Blocks are
// independent. Arrays are aligned to 16 bytes (kAlignment in binding/reader.h, kPackedAlignment),
// so a thread loads four or eight elements at once, and single elements at a tensor's end.
// sum_of_squares_kernel also loads single elements if its chunk, whose size the caller chooses, is
// not aligned. Only that kernel has shared memory, one float per warp, and a barrier before these
// are summed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "adamw/kernels.h"
#include "common/integers.h"
#include "common/launch.cuh"
#include "common/types.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 256;  // per block

// The 64-bit words of a list entry, which describes one tensor: its number of elements, its first
// block, the type of its first array, then the addresses of its arrays.
enum EntryWord : int { kSize, kFirstBlock, kType, kAddresses };

// Words in a list, over all entries. With the other arguments, this stays below the limit for
// kernel parameters: 32,764 bytes from CUDA 12.1 and compute capability 7.0 on.
constexpr int kListWords = 3968;

// The tensors of a launch, as a kernel's parameter: `count` entries of `stride` words.
struct TensorList {
  int count, stride;
  unsigned long long words[kListWords];

  __device__ const unsigned long long* entry(int i) const { return words + i * stride; }

  // Returns the entry of the tensor that this block works on.
  __device__ const unsigned long long* find(unsigned block) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (entry(middle)[kFirstBlock] <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return entry(low);
  }
};

// Returns the address in a word of an entry.
__device__ inline float* pointer(unsigned long long word) { return reinterpret_cast<float*>(word); }

// The first array of an entry, from element `start` on, read as float32 whatever its type.
struct FirstArray {
  Type type;
  unsigned long long data;

  __device__ FirstArray(const unsigned long long* entry, long long start)
      : type(static_cast<Type>(entry[kType])) {
    data = entry[kAddresses] + start * (type == Type::kFloat32 ? 4 : 2);
  }
  // True if four elements can be loaded at once.
  __device__ bool aligned() const { return data % (type == Type::kFloat32 ? 16 : 8) == 0; }
  // Returns read(pointer of the array's type).
  template <class Read>
  __device__ auto as_type(const Read& read) const {
    switch (type) {
      case Type::kFloat32:
        return read(reinterpret_cast<const float*>(data));
      case Type::kFloat16:
        return read(reinterpret_cast<const __half*>(data));
      default:
        return read(reinterpret_cast<const __nv_bfloat16*>(data));
    }
  }
  __device__ float one(long long i) const {
    return as_type([&](const auto* from) { return wide(from[i]); });
  }
  __device__ float4 four(long long i) const {
    return as_type([&](const auto* from) {
      const auto found = *reinterpret_cast<
          const AlignedArray<std::remove_const_t<std::remove_pointer_t<decltype(from)>>, 4>*>(from +
                                                                                              i);
      return float4{wide(found.at[0]), wide(found.at[1]), wide(found.at[2]), wide(found.at[3])};
    });
  }
};

// partial[block] = sum of squares of the block's chunk. Sums over threads, warps and blocks are in
// a fixed order, so that results are the same in every run.
__global__ void __launch_bounds__(kThreads)
    sum_of_squares_kernel(const __grid_constant__ TensorList tensors, long long chunk,
                          float* partial) {
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const long long start = static_cast<long long>(blockIdx.x - entry[kFirstBlock]) * chunk;
  const long long left = static_cast<long long>(entry[kSize]) - start,
                  count = left < chunk ? left : chunk;
  const FirstArray from(entry, start);
  float sum = 0;
  const long long vectors = from.aligned() ? count / 4 : 0;
#pragma unroll 4
  for (long long i = threadIdx.x; i < vectors; i += kThreads) {
    const float4 v = from.four(4 * i);
    sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
  }
  for (long long i = 4 * vectors + threadIdx.x; i < count; i += kThreads)
    sum += from.one(i) * from.one(i);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  __shared__ float warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (const float warp : warps) total += warp;
    partial[blockIdx.x] = total;
  }
}

// Returns two numbers rounded to the type of the last argument.
__device__ inline __half2 pair(float x, float y, __half) { return __floats2half2_rn(x, y); }
__device__ inline __nv_bfloat162 pair(float x, float y, __nv_bfloat16) {
  return __floats2bfloat162_rn(x, y);
}

// The arguments of AdamW other than its tensors.
struct Rule {
  float b1, b2, rest1, rest2, eps, decay;
  int averages;
  Type copies;
  const float* scalars;
};

// Vectors of four elements per thread of adamw_kernel, narrow_kernel or pack_kernel.
constexpr int kVectors = 4;
constexpr long long kBlockElements = kThreads * kVectors * 4LL;

// One element's step (formulas in plan.h); `s`: the scalars.
__device__ inline void step(const Rule& rule, const float* s, float g, float& p, float& m,
                            float& v) {
  g *= s[kGradientFactor];
  m = rule.b1 * m + rule.rest1 * g;
  v = rule.b2 * v + rule.rest2 * (g * g);
  p -= s[kLearningRate] *
       (m / s[kCorrection1] / (sqrtf(v / s[kCorrection2]) + rule.eps) + rule.decay * p);
}

// Two elements of T for each pair, stored at once.
template <class T, int kPairs>
struct alignas(4 * kPairs) Pairs {
  decltype(pair(0, 0, T())) at[kPairs];
};

// Writes elements of a copy or of a packed array, from `i` on.
__device__ inline void write_copy(float* copy, long long i, float4 p) {
  *reinterpret_cast<float4*>(copy + i) = p;
}
template <class T>
__device__ inline void write_copy(T* copy, long long i, float4 p) {
  *reinterpret_cast<Pairs<T, 2>*>(copy + i) = {{pair(p.x, p.y, T()), pair(p.z, p.w, T())}};
}
template <class T>
__device__ inline void write_copy(T* copy, long long i, float p) {
  copy[i] = narrow<T>(p);
}
template <class Value>
__device__ inline void write_copy(Type type, unsigned long long copy, long long i, Value p) {
  if (!copy) return;
  if (type == Type::kFloat16) {
    write_copy(reinterpret_cast<__half*>(copy), i, p);
  } else {
    write_copy(reinterpret_cast<__nv_bfloat16*>(copy), i, p);
  }
}

// Does one step of AdamW, of the averages of the weights and of the copies, for the block's
// elements.
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ TensorList tensors, const __grid_constant__ Rule rule) {
  if (rule.scalars[kApplied] == 0) return;
  float s[kFirstFollow];
  for (int i = 0; i < kFirstFollow; ++i) s[i] = rule.scalars[i];
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const auto size = static_cast<long long>(entry[kSize]);
  const long long start = static_cast<long long>(blockIdx.x - entry[kFirstBlock]) * kBlockElements;
  const FirstArray g(entry, 0);
  float* const p = pointer(entry[kAddresses + kParameter]);
  float* const m = pointer(entry[kAddresses + kFirstMoment]);
  float* const v = pointer(entry[kAddresses + kSecondMoment]);
  const unsigned long long copy = entry[kAddresses + kFirstAverage + rule.averages];
#pragma unroll 2
  for (int round = 0; round < kVectors; ++round) {
    const long long at = start + 4LL * (round * kThreads + threadIdx.x);
    if (at + 4 <= size) {
      const float4 gs = g.four(at);
      float4 ps = *reinterpret_cast<const float4*>(p + at),
             ms = *reinterpret_cast<const float4*>(m + at);
      float4 vs = *reinterpret_cast<const float4*>(v + at);
      step(rule, s, gs.x, ps.x, ms.x, vs.x);
      step(rule, s, gs.y, ps.y, ms.y, vs.y);
      step(rule, s, gs.z, ps.z, ms.z, vs.z);
      step(rule, s, gs.w, ps.w, ms.w, vs.w);
      *reinterpret_cast<float4*>(p + at) = ps;
      *reinterpret_cast<float4*>(m + at) = ms;
      *reinterpret_cast<float4*>(v + at) = vs;
      write_copy(rule.copies, copy, at, ps);
      for (int a = 0; a < rule.averages; ++a) {
        const float follow = rule.scalars[kFirstFollow + a];
        auto* const to =
            reinterpret_cast<float4*>(pointer(entry[kAddresses + kFirstAverage + a]) + at);
        float4 e = *to;
        e.x += follow * (ps.x - e.x);
        e.y += follow * (ps.y - e.y);
        e.z += follow * (ps.z - e.z);
        e.w += follow * (ps.w - e.w);
        *to = e;
      }
    } else {
      for (long long i = at; i < size; ++i) {
        step(rule, s, g.one(i), p[i], m[i], v[i]);
        write_copy(rule.copies, copy, i, p[i]);
        for (int a = 0; a < rule.averages; ++a) {
          float& e = pointer(entry[kAddresses + kFirstAverage + a])[i];
          e += rule.scalars[kFirstFollow + a] * (p[i] - e);
        }
      }
    }
  }
}

// Rounds the block's float32 elements to T.
template <class T>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ TensorList tensors) {
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const auto size = static_cast<long long>(entry[kSize]);
  const long long start = static_cast<long long>(blockIdx.x - entry[kFirstBlock]) * kBlockElements;
  const float* const from = pointer(entry[kAddresses]);
  T* const to = reinterpret_cast<T*>(entry[kAddresses + 1]);
#pragma unroll
  for (int round = 0; round < kVectors / 2; ++round) {
    const long long at = start + 8LL * (round * kThreads + threadIdx.x);
    if (at + 8 <= size) {
      const auto* const fours = reinterpret_cast<const float4*>(from + at);
      const float4 a = fours[0], b = fours[1];
      *reinterpret_cast<Pairs<T, 4>*>(to + at) = {
          {pair(a.x, a.y, T()), pair(a.z, a.w, T()), pair(b.x, b.y, T()), pair(b.z, b.w, T())}};
    } else {
      for (long long i = at; i < size; ++i) to[i] = narrow<T>(from[i]);
    }
  }
}

// Writes the block's elements to their packed array of T, and the zeros after the tensor's last
// element. The room of a tensor ends in the block of that element, because kBlockElements is a
// multiple of kPackedAlignment.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ TensorList tensors) {
  static_assert(kBlockElements % kPackedAlignment == 0);
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const auto size = static_cast<long long>(entry[kSize]);
  const long long start = static_cast<long long>(blockIdx.x - entry[kFirstBlock]) * kBlockElements;
  const FirstArray from(entry, 0);
  T* const to = reinterpret_cast<T*>(entry[kAddresses + 1]);
#pragma unroll
  for (int round = 0; round < kVectors; ++round) {
    const long long at = start + 4LL * (round * kThreads + threadIdx.x);
    if (at + 4 <= size) {
      write_copy(to, at, from.four(at));
    } else if (at < packed_room(size)) {
      for (long long i = at; i < at + 4; ++i) to[i] = narrow<T>(i < size ? from.one(i) : 0);
    }
  }
}

// Calls run(list, blocks, blocks of earlier launches), which launches a kernel, for as many tensors
// at a time as a list holds. Tensor i has `arrays` arrays, whose addresses are at pointers(i) and
// the first of which has type(i). A block processes `chunk` elements.
template <class Types, class Pointers, class Run>
cudaError_t launch_all(const std::vector<int64_t>& sizes, int64_t arrays, int64_t chunk,
                       const Types& type, const Pointers& pointers, const Run& run) {
  static thread_local TensorList tensors;  // 31 KiB, too large for the stack; a launch copies it
  tensors.count = 0;
  tensors.stride = static_cast<int>(kAddresses + arrays);
  const int max_count = kListWords / tensors.stride;
  int64_t blocks = 0, before = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 0) {
      unsigned long long* const entry = tensors.words + tensors.count++ * tensors.stride;
      entry[kSize] = static_cast<unsigned long long>(sizes[i]);
      entry[kFirstBlock] = static_cast<unsigned long long>(blocks);
      entry[kType] = static_cast<unsigned long long>(type(i));
      std::memcpy(entry + kAddresses, pointers(i), arrays * sizeof(*entry));
      blocks += ceil_div(sizes[i], chunk);
    }
    if (tensors.count == max_count || (i + 1 == sizes.size() && tensors.count > 0)) {
      const cudaError_t error = run(tensors, dim3(static_cast<unsigned>(blocks)), before);
      if (error != cudaSuccess) return error;
      before += blocks;
      tensors.count = 0;
      blocks = 0;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t sum_of_squares(const SumOfSquares& plan, cudaStream_t stream, KernelSet) {
  return launch_all(
      plan.sizes, 1, plan.chunk, [&](size_t i) { return plan.types[i]; },
      [&](size_t i) { return plan.tensors.data() + i; },
      [&](const TensorList& tensors, dim3 blocks, int64_t before) {
        return launch(sum_of_squares_kernel, blocks, kThreads, 0, stream, tensors, plan.chunk,
                      plan.partial + before);
      });
}

cudaError_t adamw(const AdamW& plan, cudaStream_t stream, KernelSet) {
  const Rule rule{plan.b1,
                  plan.b2,
                  plan.rest1,
                  plan.rest2,
                  plan.eps,
                  plan.decay,
                  static_cast<int>(plan.averages),
                  plan.copies,
                  plan.scalars};
  return launch_all(
      plan.sizes, plan.arrays_per_tensor(), kBlockElements, [&](size_t i) { return plan.types[i]; },
      [&](size_t i) { return plan.arrays.data() + i * plan.arrays_per_tensor(); },
      [&](const TensorList& tensors, dim3 blocks, int64_t) {
        return launch(adamw_kernel, blocks, kThreads, 0, stream, tensors, rule);
      });
}

cudaError_t narrow_all(const Narrow& plan, cudaStream_t stream, KernelSet) {
  return launch_all(
      plan.sizes, 2, kBlockElements, [](size_t) { return Type::kFloat32; },
      [&](size_t i) { return plan.arrays.data() + 2 * i; },
      [&](const TensorList& tensors, dim3 blocks, int64_t) {
        const auto kernel =
            plan.type == Type::kFloat16 ? narrow_kernel<__half> : narrow_kernel<__nv_bfloat16>;
        return launch(kernel, blocks, kThreads, 0, stream, tensors);
      });
}

cudaError_t pack(const Pack& plan, cudaStream_t stream, KernelSet) {
  return launch_all(
      plan.sizes, 2, kBlockElements, [&](size_t i) { return plan.types[i]; },
      [&](size_t i) { return plan.arrays.data() + 2 * i; },
      [&](const TensorList& tensors, dim3 blocks, int64_t) {
        const auto kernel =
            plan.type == Type::kFloat32 ? pack_kernel<float> : pack_kernel<__nv_bfloat16>;
        return launch(kernel, blocks, kThreads, 0, stream, tensors);
      });
}

}  // namespace jaxunet::cuda
