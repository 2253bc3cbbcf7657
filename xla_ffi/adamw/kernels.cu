// Many tensors a launch: their pointers and sizes travel as the kernel's parameter, in which each block finds its own.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "../conv3x3/numbers.cuh"
#include "kernels.h"

namespace jaxunet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 3968;  // with what else there is, below the 32,764 bytes that parameters may have
constexpr int kHead = 3;      // before a tensor's pointers: its size, its first block, the type of the first pointer

// `count` entries of `stride` words.
struct Tensors {
  int count, stride;
  unsigned long long words[kWords];

  __device__ const unsigned long long* entry(int i) const { return words + i * stride; }

  // The entry that has this block.
  __device__ const unsigned long long* find(unsigned block) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (entry(middle)[1] <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return entry(low);
  }
};

__device__ inline float* pointer(unsigned long long word) { return reinterpret_cast<float*>(word); }

// What the first pointer of an entry points to, from element `start` on, as float32.
struct Gradient {
  Type type;
  unsigned long long data;

  __device__ Gradient(const unsigned long long* entry, long long start) : type(static_cast<Type>(entry[2])) {
    data = entry[kHead] + start * (type == Type::kFloat32 ? 4 : 2);
  }
  __device__ bool aligned() const { return data % (type == Type::kFloat32 ? 16 : 8) == 0; }
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
      const auto found =
          *reinterpret_cast<const Vector<std::remove_const_t<std::remove_pointer_t<decltype(from)>>, 4>*>(from + i);
      return float4{wide(found.at[0]), wide(found.at[1]), wide(found.at[2]), wide(found.at[3])};
    });
  }
};

__global__ void __launch_bounds__(kThreads)
    sum_of_squares_kernel(const __grid_constant__ Tensors tensors, long long chunk, float* partial) {
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const long long start = static_cast<long long>(blockIdx.x - entry[1]) * chunk;
  const long long left = static_cast<long long>(entry[0]) - start, count = left < chunk ? left : chunk;
  const Gradient from(entry, start);
  float sum = 0;
  const long long vectors = from.aligned() ? count / 4 : 0;
#pragma unroll 4
  for (long long i = threadIdx.x; i < vectors; i += kThreads) {
    const float4 v = from.four(4 * i);
    sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
  }
  for (long long i = 4 * vectors + threadIdx.x; i < count; i += kThreads) sum += from.one(i) * from.one(i);
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

struct Rule {
  float b1, b2, rest1, rest2, eps, decay;
  int averages;
  const float* scalars;
};

constexpr int kPerThread = 4;                             // vectors of four
constexpr long long kStep = kThreads * kPerThread * 4LL;  // elements of a block

__device__ inline void step(const Rule& rule, const float* s, float g, float& p, float& m, float& v) {
  g *= s[1];
  m = rule.b1 * m + rule.rest1 * g;
  v = rule.b2 * v + rule.rest2 * (g * g);
  p -= s[2] * (m / s[3] / (sqrtf(v / s[4]) + rule.eps) + rule.decay * p);
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ Tensors tensors, const __grid_constant__ Rule rule) {
  if (rule.scalars[0] == 0) return;  // a step that is skipped
  float s[kAdamWScalars];
  for (int i = 0; i < kAdamWScalars; ++i) s[i] = rule.scalars[i];
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const auto size = static_cast<long long>(entry[0]);
  const long long start = static_cast<long long>(blockIdx.x - entry[1]) * kStep;
  const Gradient g(entry, 0);
  float *const p = pointer(entry[kHead + 1]), *const m = pointer(entry[kHead + 2]),
               *const v = pointer(entry[kHead + 3]);
#pragma unroll 2
  for (int round = 0; round < kPerThread; ++round) {
    const long long at = start + 4LL * (round * kThreads + threadIdx.x);
    if (at + 4 <= size) {
      const float4 gs = g.four(at);
      float4 ps = *reinterpret_cast<const float4*>(p + at), ms = *reinterpret_cast<const float4*>(m + at);
      float4 vs = *reinterpret_cast<const float4*>(v + at);
      step(rule, s, gs.x, ps.x, ms.x, vs.x);
      step(rule, s, gs.y, ps.y, ms.y, vs.y);
      step(rule, s, gs.z, ps.z, ms.z, vs.z);
      step(rule, s, gs.w, ps.w, ms.w, vs.w);
      *reinterpret_cast<float4*>(p + at) = ps;
      *reinterpret_cast<float4*>(m + at) = ms;
      *reinterpret_cast<float4*>(v + at) = vs;
      for (int a = 0; a < rule.averages; ++a) {
        const float follow = rule.scalars[kAdamWScalars + a];
        auto* const to = reinterpret_cast<float4*>(pointer(entry[kHead + 4 + a]) + at);
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
        for (int a = 0; a < rule.averages; ++a) {
          float& e = pointer(entry[kHead + 4 + a])[i];
          e += rule.scalars[kAdamWScalars + a] * (p[i] - e);
        }
      }
    }
  }
}

__device__ inline __half2 pair(float x, float y, __half) { return __floats2half2_rn(x, y); }
__device__ inline __nv_bfloat162 pair(float x, float y, __nv_bfloat16) { return __floats2bfloat162_rn(x, y); }

template <class T>
struct alignas(16) Pairs {
  decltype(pair(0, 0, T())) at[4];
};

template <class T>
__global__ void __launch_bounds__(kThreads) narrow_kernel(const __grid_constant__ Tensors tensors) {
  const unsigned long long* const entry = tensors.find(blockIdx.x);
  const auto size = static_cast<long long>(entry[0]);
  const long long start = static_cast<long long>(blockIdx.x - entry[1]) * kStep;
  const float* const from = pointer(entry[kHead]);
  T* const to = reinterpret_cast<T*>(entry[kHead + 1]);
#pragma unroll
  for (int round = 0; round < kPerThread / 2; ++round) {
    const long long at = start + 8LL * (round * kThreads + threadIdx.x);
    if (at + 8 <= size) {
      const auto* const fours = reinterpret_cast<const float4*>(from + at);
      const float4 a = fours[0], b = fours[1];
      *reinterpret_cast<Pairs<T>*>(to + at) = {
          {pair(a.x, a.y, T()), pair(a.z, a.w, T()), pair(b.x, b.y, T()), pair(b.z, b.w, T())}};
    } else {
      for (long long i = at; i < size; ++i) to[i] = narrow<T>(from[i]);
    }
  }
}

// launch(tensors, blocks, first block of all) for as many tensors at a time as the parameter holds; every tensor has
// `arrays` pointers, the first to elements of type(i).
template <class Types, class Pointers, class Launch>
cudaError_t each(const std::vector<int64_t>& sizes, int64_t arrays, int64_t chunk, const Types& type,
                 const Pointers& pointers, const Launch& launch) {
  static thread_local Tensors tensors;
  tensors.count = 0;
  tensors.stride = static_cast<int>(kHead + arrays);
  const int most = kWords / tensors.stride;
  int64_t blocks = 0, before = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 0) {
      unsigned long long* const entry = tensors.words + tensors.count++ * tensors.stride;
      entry[0] = static_cast<unsigned long long>(sizes[i]);
      entry[1] = static_cast<unsigned long long>(blocks);
      entry[2] = static_cast<unsigned long long>(type(i));
      std::memcpy(entry + kHead, pointers(i), arrays * sizeof(*entry));
      blocks += (sizes[i] + chunk - 1) / chunk;
    }
    if (tensors.count == most || (i + 1 == sizes.size() && tensors.count > 0)) {
      launch(tensors, static_cast<unsigned>(blocks), before);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
      before += blocks;
      tensors.count = 0;
      blocks = 0;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t sum_of_squares(const SumOfSquares& plan, cudaStream_t stream) {
  return each(
      plan.sizes, 1, plan.chunk, [&](size_t i) { return plan.types[i]; },
      [&](size_t i) { return plan.tensors.data() + i; },
      [&](const Tensors& tensors, unsigned blocks, int64_t before) {
        sum_of_squares_kernel<<<blocks, kThreads, 0, stream>>>(tensors, plan.chunk, plan.partial + before);
      });
}

cudaError_t adamw(const AdamW& plan, cudaStream_t stream) {
  const Rule rule{plan.b1,     plan.b2, plan.rest1, plan.rest2, plan.eps, plan.decay, static_cast<int>(plan.averages),
                  plan.scalars};
  return each(
      plan.sizes, plan.kinds(), kStep, [&](size_t i) { return plan.types[i]; },
      [&](size_t i) { return plan.arrays.data() + i * plan.kinds(); },
      [&](const Tensors& tensors, unsigned blocks, int64_t) {
        adamw_kernel<<<blocks, kThreads, 0, stream>>>(tensors, rule);
      });
}

cudaError_t narrow_all(const Narrow& plan, cudaStream_t stream) {
  return each(
      plan.sizes, 2, kStep, [](size_t) { return Type::kFloat32; }, [&](size_t i) { return plan.arrays.data() + 2 * i; },
      [&](const Tensors& tensors, unsigned blocks, int64_t) {
        if (plan.type == Type::kFloat16) {
          narrow_kernel<__half><<<blocks, kThreads, 0, stream>>>(tensors);
        } else {
          narrow_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(tensors);
        }
      });
}

}  // namespace jaxunet::cuda
