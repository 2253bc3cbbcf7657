// Attention forward and backward, one warp a row of queries (or of keys), on ordinary arithmetic in float32: correct
// for every head width from 1 to 256, where the flash kernels do not go. A warp's lanes share the head's width;
// nothing is summed by atomics, so results are the same from run to run.

#include "../by_type.cuh"
#include "simple.h"

namespace jaxunet::cuda {
namespace {

constexpr int kWarps = 4;    // a block
constexpr int kPerLane = 8;  // 32 lanes × 8 = the widest head

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* to, float x) { *to = x; }
__device__ void put(__half* to, float x) { *to = __float2half(x); }
__device__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }

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
      if (d < width) put(to + d, at[i] * factor);
    }
  }
  __device__ float dot(const Row& other) const {
    float total = 0;
    for (int i = 0; i < kPerLane; ++i) total += at[i] * other.at[i];
    return warp_sum(total);
  }
  // this = this · factor + other · weight
  __device__ void blend(float factor, const Row& other, float weight) {
    for (int i = 0; i < kPerLane; ++i) at[i] = at[i] * factor + other.at[i] * weight;
  }
};

// Where the rows of this warp's head lie.
struct Place {
  int64_t head, sample, own;  // own: the row of this warp
  int tokens, heads, width;
  int64_t channels;

  template <class Plan>
  __device__ explicit Place(const Plan& plan)
      : tokens(static_cast<int>(plan.tokens)),
        heads(static_cast<int>(plan.heads)),
        width(static_cast<int>(plan.width)),
        channels(plan.heads * plan.width) {
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
    own = unit % tokens;
    head = unit / tokens % heads;
    sample = unit / tokens / heads;
  }
  template <class Plan>
  __device__ bool inside(const Plan& plan) const {
    return sample < plan.batch;
  }
  // Row `token` of q (0), k (1) or v (2).
  template <class T>
  __device__ T* packed(T* qkv, int which, int64_t token) const {
    return qkv + ((sample * tokens + token) * 3 + which) * channels + head * width;
  }
  template <class T>
  __device__ T* unpacked(T* x, int64_t token) const {
    return x + (sample * tokens + token) * channels + head * width;
  }
  __device__ int64_t norm(int64_t token) const { return (sample * heads + head) * tokens + token; }
};

// Milakov & Gimelshein 2018, arXiv 1805.02867: softmax in one walk over the keys.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(const AttentionForward plan) {
  const Place place(plan);
  if (!place.inside(plan)) return;
  const auto* qkv = static_cast<const T*>(plan.qkv);
  const float scale = rsqrtf(static_cast<float>(place.width));
  const Row q(place.packed(qkv, 0, place.own), place.width);
  Row sums;
  float most = -INFINITY, total = 0;
  for (int t = 0; t < place.tokens; ++t) {
    const float logit = q.dot(Row(place.packed(qkv, 1, t), place.width)) * scale;
    const float higher = fmaxf(most, logit), shrink = expf(most - higher), weight = expf(logit - higher);
    sums.blend(shrink, Row(place.packed(qkv, 2, t), place.width), weight);
    total = total * shrink + weight;
    most = higher;
  }
  sums.store(place.unpacked(static_cast<T*>(plan.out), place.own), place.width, 1 / total);
  if (threadIdx.x == 0) plan.norm[place.norm(place.own)] = most + logf(total);
}

// The gradient of one row of q.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) backward_query_kernel(const AttentionBackward plan) {
  const Place place(plan);
  if (!place.inside(plan)) return;
  const auto *qkv = static_cast<const T*>(plan.qkv), *out = static_cast<const T*>(plan.out),
             *grad = static_cast<const T*>(plan.grad);
  const float scale = rsqrtf(static_cast<float>(place.width)), norm = plan.norm[place.norm(place.own)];
  const Row q(place.packed(qkv, 0, place.own), place.width), g(place.unpacked(grad, place.own), place.width);
  const float delta = g.dot(Row(place.unpacked(out, place.own), place.width));
  Row dq;
  for (int t = 0; t < place.tokens; ++t) {
    const Row k(place.packed(qkv, 1, t), place.width), v(place.packed(qkv, 2, t), place.width);
    const float weight = expf(q.dot(k) * scale - norm);
    dq.blend(1, k, weight * (g.dot(v) - delta));
  }
  dq.store(place.packed(static_cast<T*>(plan.dqkv), 0, place.own), place.width, scale);
}

// The gradients of one row of k and of v.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) backward_key_kernel(const AttentionBackward plan) {
  const Place place(plan);
  if (!place.inside(plan)) return;
  const auto *qkv = static_cast<const T*>(plan.qkv), *out = static_cast<const T*>(plan.out),
             *grad = static_cast<const T*>(plan.grad);
  const float scale = rsqrtf(static_cast<float>(place.width));
  const Row k(place.packed(qkv, 1, place.own), place.width), v(place.packed(qkv, 2, place.own), place.width);
  Row dk, dv;
  for (int t = 0; t < place.tokens; ++t) {
    const Row q(place.packed(qkv, 0, t), place.width), g(place.unpacked(grad, t), place.width);
    const float weight = expf(q.dot(k) * scale - plan.norm[place.norm(t)]);
    const float delta = g.dot(Row(place.unpacked(out, t), place.width));
    dk.blend(1, q, weight * (g.dot(v) - delta));
    dv.blend(1, g, weight);
  }
  auto* dqkv = static_cast<T*>(plan.dqkv);
  dk.store(place.packed(dqkv, 1, place.own), place.width, scale);
  dv.store(place.packed(dqkv, 2, place.own), place.width, 1);
}

// One warp for each row of each head.
template <class Plan>
cudaError_t launch(void (*kernel)(Plan), const Plan& plan, cudaStream_t stream) {
  const int64_t rows = plan.batch * plan.heads * plan.tokens;
  if (rows == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>((rows + kWarps - 1) / kWarps), dim3(32, kWarps), 0, stream>>>(plan);
  return cudaGetLastError();
}

template <class T>
cudaError_t backward(const AttentionBackward& plan, cudaStream_t stream) {
  const cudaError_t error = launch(backward_query_kernel<T>, plan, stream);
  return error == cudaSuccess ? launch(backward_key_kernel<T>, plan, stream) : error;
}

}  // namespace

cudaError_t simple_attention_forward(const AttentionForward& plan, cudaStream_t stream) {
  return by_type(plan.type, [&](auto nought) { return launch(forward_kernel<decltype(nought)>, plan, stream); });
}

cudaError_t simple_attention_backward(const AttentionBackward& plan, cudaStream_t stream) {
  return by_type(plan.type, [&](auto nought) { return backward<decltype(nought)>(plan, stream); });
}

}  // namespace jaxunet::cuda
