// Attention forward and backward in ordinary float32 arithmetic, for heads of width 1 to 256 that
// the flash kernels do not accept (dispatch.cu), such as those whose width is not a multiple of 8.
// plan.h and flash_backward.cuh have the formulas.
//
// A warp takes one row of one head: a query, for out and for dq; a key, for dk and dv. The warp
// iterates over all rows of the other kind, and its lanes divide the head's width: lane + 32 * i. A
// block has kWarps independent warps. Grid: (rows of all heads / kWarps). No shared memory, no
// barriers, no atomics: results are the same in every run.
#include "common/dispatch_dtype.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "common/types.cuh"
#include "simple.h"

namespace jaxunet::cuda {
namespace {

constexpr int kWarps = 4;    // per block
constexpr int kPerLane = 8;  // channels per lane: 32 * 8 = 256, the widest head

__device__ float warp_sum(float x) {
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

// One row of a head, spread over the lanes of a warp; zero beyond the width.
struct Row {
  float at[kPerLane];

  __device__ Row() {
    for (int i = 0; i < kPerLane; ++i) at[i] = 0;
  }
  template <class T>
  __device__ Row(const T* from, int width) {
    for (int i = 0; i < kPerLane; ++i) {
      const int d = threadIdx.x + 32 * i;
      at[i] = d < width ? wide(from[d]) : 0.0f;
    }
  }
  template <class T>
  __device__ void store(T* to, int width, float factor) const {
    for (int i = 0; i < kPerLane; ++i) {
      const int d = threadIdx.x + 32 * i;
      if (d < width) to[d] = narrow<T>(at[i] * factor);
    }
  }
  __device__ float dot(const Row& other) const {
    float total = 0;
    for (int i = 0; i < kPerLane; ++i) total += at[i] * other.at[i];
    return warp_sum(total);
  }
  // this = this * factor + other * weight
  __device__ void blend(float factor, const Row& other, float weight) {
    for (int i = 0; i < kPerLane; ++i) at[i] = at[i] * factor + other.at[i] * weight;
  }
};

// This warp's row, and where the rows of its head lie.
struct RowPlace {
  int64_t head, sample, own_row;
  int tokens, heads, width;
  int64_t channels;

  template <class Plan>
  __device__ explicit RowPlace(const Plan& plan)
      : tokens(static_cast<int>(plan.tokens)),
        heads(static_cast<int>(plan.heads)),
        width(static_cast<int>(plan.width)),
        channels(plan.heads * plan.width) {
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
    own_row = unit % tokens;
    head = unit / tokens % heads;
    sample = unit / tokens / heads;
  }
  template <class Plan>
  __device__ bool exists(const Plan& plan) const {
    return sample < plan.batch;
  }
  // Row `token` of q, k or v.
  template <class T>
  __device__ T* packed(T* qkv, Qkv which, int64_t token) const {
    return qkv + ((sample * tokens + token) * 3 + which) * channels + head * width;
  }
  template <class T>
  __device__ T* unpacked(T* x, int64_t token) const {
    return x + (sample * tokens + token) * channels + head * width;
  }
  __device__ int64_t lse(int64_t token) const { return (sample * heads + head) * tokens + token; }
};

// Computes out and lse of one query, with online softmax in one pass over the keys (Milakov &
// Gimelshein 2018, arXiv 1805.02867).
template <class T>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(const AttentionForward plan) {
  const RowPlace place(plan);
  if (!place.exists(plan)) return;
  const auto* qkv = static_cast<const T*>(plan.qkv);
  const float scale = rsqrtf(static_cast<float>(place.width));
  const Row q(place.packed(qkv, kQ, place.own_row), place.width);
  Row sums;
  float max = -INFINITY, total = 0;
  for (int t = 0; t < place.tokens; ++t) {
    const float logit = q.dot(Row(place.packed(qkv, kK, t), place.width)) * scale;
    const float new_max = fmaxf(max, logit), rescale = expf(max - new_max),
                weight = expf(logit - new_max);
    sums.blend(rescale, Row(place.packed(qkv, kV, t), place.width), weight);
    total = total * rescale + weight;
    max = new_max;
  }
  sums.store(place.unpacked(static_cast<T*>(plan.out), place.own_row), place.width, 1 / total);
  if (threadIdx.x == 0) plan.lse[place.lse(place.own_row)] = max + logf(total);
}

// dq of one query.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) backward_query_kernel(const AttentionBackward plan) {
  const RowPlace place(plan);
  if (!place.exists(plan)) return;
  const auto *qkv = static_cast<const T*>(plan.qkv), *out = static_cast<const T*>(plan.out),
             *grad = static_cast<const T*>(plan.grad);
  const float scale = rsqrtf(static_cast<float>(place.width)),
              lse = plan.lse[place.lse(place.own_row)];
  const Row q(place.packed(qkv, kQ, place.own_row), place.width),
      g(place.unpacked(grad, place.own_row), place.width);
  const float delta = g.dot(Row(place.unpacked(out, place.own_row), place.width));
  Row dq;
  for (int t = 0; t < place.tokens; ++t) {
    const Row k(place.packed(qkv, kK, t), place.width), v(place.packed(qkv, kV, t), place.width);
    const float weight = expf(q.dot(k) * scale - lse);
    dq.blend(1, k, weight * (g.dot(v) - delta));
  }
  dq.store(place.packed(static_cast<T*>(plan.dqkv), kQ, place.own_row), place.width, scale);
}

// dk and dv of one key.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) backward_key_kernel(const AttentionBackward plan) {
  const RowPlace place(plan);
  if (!place.exists(plan)) return;
  const auto *qkv = static_cast<const T*>(plan.qkv), *out = static_cast<const T*>(plan.out),
             *grad = static_cast<const T*>(plan.grad);
  const float scale = rsqrtf(static_cast<float>(place.width));
  const Row k(place.packed(qkv, kK, place.own_row), place.width),
      v(place.packed(qkv, kV, place.own_row), place.width);
  Row dk, dv;
  for (int t = 0; t < place.tokens; ++t) {
    const Row q(place.packed(qkv, kQ, t), place.width), g(place.unpacked(grad, t), place.width);
    const float weight = expf(q.dot(k) * scale - plan.lse[place.lse(t)]);
    const float delta = g.dot(Row(place.unpacked(out, t), place.width));
    dk.blend(1, q, weight * (g.dot(v) - delta));
    dv.blend(1, g, weight);
  }
  auto* dqkv = static_cast<T*>(plan.dqkv);
  dk.store(place.packed(dqkv, kK, place.own_row), place.width, scale);
  dv.store(place.packed(dqkv, kV, place.own_row), place.width, 1);
}

// Launches one warp for each row of each head.
template <class Plan>
cudaError_t launch_rows(void (*kernel)(Plan), const Plan& plan, cudaStream_t stream) {
  const int64_t rows = plan.batch * plan.heads * plan.tokens;
  if (rows == 0) return cudaSuccess;
  return launch(kernel, dim3(static_cast<unsigned>(ceil_div(rows, kWarps))), dim3(32, kWarps), 0,
                stream, plan);
}

template <class T>
cudaError_t backward(const AttentionBackward& plan, cudaStream_t stream) {
  const cudaError_t error = launch_rows(backward_query_kernel<T>, plan, stream);
  return error == cudaSuccess ? launch_rows(backward_key_kernel<T>, plan, stream) : error;
}

}  // namespace

cudaError_t simple_attention_forward(const AttentionForward& plan, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    return launch_rows(forward_kernel<decltype(element)>, plan, stream);
  });
}

cudaError_t simple_attention_backward(const AttentionBackward& plan, cudaStream_t stream) {
  return dispatch_dtype(plan.type,
                        [&](auto element) { return backward<decltype(element)>(plan, stream); });
}

}  // namespace jaxunet::cuda
