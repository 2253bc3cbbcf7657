// For bench.cu: attention and its gradients in float64 by simple kernels.
//
// qkv and its gradient are (batch, tokens, 3, heads, channels), out and its gradient (batch,
// tokens, heads, channels), lse, the log-sum-exp, (batch, heads, tokens). Kernels call tokens N,
// heads H, channels of a head D.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "../errors.cuh"
#include "../graph_times.cuh"
#include "../random.cuh"

// Converts to float64.
template <class T>
__device__ double d(T x) {
  return (double)(float)x;
}
// Attention, and its weights p. A block computes one query of one head: (batch, head, query).
template <class T>
__global__ void ref_fwd(const T* qkv, int N, int H, int D, double* p, double* out, double* lse) {
  int i = blockIdx.x % N, bh = blockIdx.x / N, h = bh % H, b = bh / H, C = H * D;
  const T* base = qkv + (size_t)b * N * 3 * C + h * D;
  extern __shared__ double s[];
  for (int j = threadIdx.x; j < N; j += blockDim.x) {
    double a = 0;
    for (int c = 0; c < D; ++c)
      a += d(base[(size_t)i * 3 * C + c]) * d(base[(size_t)j * 3 * C + C + c]);
    s[j] = a / sqrt((double)D);
  }
  __syncthreads();
  double m = -1e300, l = 0;
  for (int j = 0; j < N; ++j) m = fmax(m, s[j]);
  for (int j = 0; j < N; ++j) l += exp(s[j] - m);
  for (int j = threadIdx.x; j < N; j += blockDim.x)
    p[((size_t)bh * N + i) * N + j] = exp(s[j] - m) / l;
  for (int c = threadIdx.x; c < D; c += blockDim.x) {
    double a = 0;
    for (int j = 0; j < N; ++j) a += exp(s[j] - m) / l * d(base[(size_t)j * 3 * C + 2 * C + c]);
    out[((size_t)b * N + i) * C + h * D + c] = a;
  }
  if (threadIdx.x == 0) lse[(size_t)bh * N + i] = m + log(l);
}
// ds = p * (dp - delta), the gradient of the logits. Blocks as above.
template <class T>
__global__ void ref_ds(const T* qkv, const T* g, int N, int H, int D, const double* p,
                       const double* out, double* ds) {
  int i = blockIdx.x % N, bh = blockIdx.x / N, h = bh % H, b = bh / H, C = H * D;
  const T* base = qkv + (size_t)b * N * 3 * C + h * D;
  size_t row = ((size_t)b * N + i) * C + h * D;
  double delta = 0;
  for (int c = 0; c < D; ++c) delta += out[row + c] * d(g[row + c]);
  for (int j = threadIdx.x; j < N; j += blockDim.x) {
    double a = 0;
    for (int c = 0; c < D; ++c) a += d(g[row + c]) * d(base[(size_t)j * 3 * C + 2 * C + c]);
    size_t at = ((size_t)bh * N + i) * N + j;
    ds[at] = p[at] * (a - delta);
  }
}
// The gradients of one token's q, k and v. Blocks as above.
template <class T>
__global__ void ref_bwd(const T* qkv, const T* g, int N, int H, int D, const double* p,
                        const double* ds, double* dq) {
  int i = blockIdx.x % N, bh = blockIdx.x / N, h = bh % H, b = bh / H, C = H * D;
  const T* base = qkv + (size_t)b * N * 3 * C + h * D;
  const double *P = p + (size_t)bh * N * N, *S = ds + (size_t)bh * N * N;
  double* o = dq + ((size_t)b * N + i) * 3 * C + h * D;
  double sc = 1 / sqrt((double)D);
  for (int c = threadIdx.x; c < D; c += blockDim.x) {
    double a = 0, k = 0, v = 0;
    for (int j = 0; j < N; ++j) {
      a += S[(size_t)i * N + j] * d(base[(size_t)j * 3 * C + C + c]);
      k += S[(size_t)j * N + i] * d(base[(size_t)j * 3 * C + c]);
      v += P[(size_t)j * N + i] * d(g[((size_t)b * N + j) * C + h * D + c]);
    }
    o[c] = a * sc;
    o[C + c] = k * sc;
    o[2 * C + c] = v;
  }
}
