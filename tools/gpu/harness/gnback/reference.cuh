// The backward pass in float64 by simple kernels, and errors against it. The formulas are those of
// group_norm/plan.h.
#pragma once

#include "common.cuh"

struct Ref {
  int batch, pixels, channels, groups, parts;
  int pc[4];  // channels of the parts
  const void* x[4];
  const void* added[2][4];
  int nadded;
  const void* dy;
  const float *scale, *offset;
  int rs;  // distance of the samples' rows in scale and offset; 0: all samples share a row
  const double *mean, *inverse;
  bool silu;
};
// The element of a tensor in parts at a sample, pixel and channel.
template <class T>
__device__ double at(const void* const* p, const Ref& r, long b, long px, int c) {
  int i = 0;
  while (c >= r.pc[i]) c -= r.pc[i++];
  return (double)(float)((const T*)p[i])[(b * r.pixels + px) * r.pc[i] + c];
}
// The statistics of a group, one block per (sample, group). All outputs are rounded to float32,
// because the kernels are given the statistics in this type.
template <class T>
__global__ void ref_stats(Ref r, double* mean, double* inverse, float* fmean, float* finv,
                          double eps) {
  int b = blockIdx.y, g = blockIdx.x, gs = r.channels / r.groups;
  long n = (long)gs * r.pixels;
  __shared__ double s[256], q[256];
  double a = 0;
  for (long i = threadIdx.x; i < n; i += 256) a += at<T>(r.x, r, b, i / gs, g * gs + i % gs);
  s[threadIdx.x] = a;
  __syncthreads();
  for (int k = 128; k; k /= 2) {
    if (threadIdx.x < k) s[threadIdx.x] += s[threadIdx.x + k];
    __syncthreads();
  }
  double m = s[0] / n;
  a = 0;
  for (long i = threadIdx.x; i < n; i += 256) {
    double d = at<T>(r.x, r, b, i / gs, g * gs + i % gs) - m;
    a += d * d;
  }
  q[threadIdx.x] = a;
  __syncthreads();
  for (int k = 128; k; k /= 2) {
    if (threadIdx.x < k) q[threadIdx.x] += q[threadIdx.x + k];
    __syncthreads();
  }
  float fm = (float)m, fi = (float)(1 / sqrt(q[0] / n + eps));
  for (int c = threadIdx.x; c < gs; c += 256) {
    long o = (long)b * r.channels + g * gs + c;
    fmean[o] = fm;
    finv[o] = fi;
    mean[o] = fm;
    inverse[o] = fi;
  }
}
// Returns dz; also n and act(z) of the same element.
template <class T>
__device__ double dz_of(const Ref& r, long b, long p, int c, double* n, double* act) {
  long o = b * r.channels + c;
  double x = at<T>(r.x, r, b, p, c);
  *n = (x - r.mean[o]) * r.inverse[o];
  double z = r.scale[(b * r.rs) + c] * *n + r.offset[b * r.rs + c],
         dy = (double)(float)((const T*)r.dy)[(b * r.pixels + p) * r.channels + c];
  if (!r.silu) {
    *act = z;
    return dy;
  }
  double s = 1 / (1 + exp(-z));
  *act = z * s;
  return dy * (s + z * s * (1 - s));
}
template <class T>
__global__ void ref_sums(Ref r, double* sums) {  // one block per (sample, channel)
  int b = blockIdx.y, c = blockIdx.x;
  double a0 = 0, a1 = 0, n, act;
  __shared__ double s[256], q[256];
  for (long p = threadIdx.x; p < r.pixels; p += 256) {
    double d = dz_of<T>(r, b, p, c, &n, &act);
    a0 += d;
    a1 += d * n;
  }
  s[threadIdx.x] = a0;
  q[threadIdx.x] = a1;
  __syncthreads();
  for (int k = 128; k; k /= 2) {
    if (threadIdx.x < k) {
      s[threadIdx.x] += s[threadIdx.x + k];
      q[threadIdx.x] += q[threadIdx.x + k];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    sums[2L * b * r.channels + c] = s[0];
    sums[(2L * b + 1) * r.channels + c] = q[0];
  }
}
// Adds the errors of a block's threads to acc: [0] sum of squared errors, [1] sum of squared
// reference values, [2] largest error, 1e300 for NaN, [3] largest reference value.
__device__ void finish(double e2, double r2, double me, double mr, double* acc) {
  __shared__ double s[4][256];
  s[0][threadIdx.x] = e2;
  s[1][threadIdx.x] = r2;
  s[2][threadIdx.x] = me;
  s[3][threadIdx.x] = mr;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 256; ++i) {
      e2 += s[0][i];
      r2 += s[1][i];
      me = !(s[2][i] <= me) ? s[2][i] : me;
      mr = fmax(mr, s[3][i]);
    }
    atomicAdd(acc, e2);
    atomicAdd(acc + 1, r2);
    unsigned long long* u = (unsigned long long*)(acc + 2);
    atomicMax(u, (unsigned long long)__double_as_longlong(isnan(me) ? 1e300 : me));
    atomicMax(u + 1, (unsigned long long)__double_as_longlong(mr));
  }
}
// acc: errors of dx, then of act(z), if `active` is given.
template <class T>
__global__ void compare_dx(Ref r, const double* sums, Parts dx, const T* active, double* acc) {
  int b = blockIdx.y, gs = r.channels / r.groups;
  long n = (long)r.pixels * r.channels;
  double N = (double)gs * r.pixels;
  double e2 = 0, r2 = 0, me = 0, mr = 0, ae2 = 0, ar2 = 0, ame = 0, amr = 0;
  const void* d[4] = {dx.data[0], dx.data[1], dx.data[2], dx.data[3]};
  for (long i = blockIdx.x * 256L + threadIdx.x; i < n; i += gridDim.x * 256L) {
    long p = i / r.channels;
    int c = i % r.channels;
    double nn, act, dz = dz_of<T>(r, b, p, c, &nn, &act), s0 = 0, s1 = 0;
    for (int k = c / gs * gs; k < c / gs * gs + gs; ++k) {
      double sc = r.scale[b * r.rs + k];
      s0 += sc * sums[2L * b * r.channels + k];
      s1 += sc * sums[(2L * b + 1) * r.channels + k];
    }
    double v =
        r.inverse[(long)b * r.channels + c] * (r.scale[b * r.rs + c] * dz - (s0 + nn * s1) / N);
    for (int k = 0; k < r.nadded; ++k) v += at<T>(r.added[k], r, b, p, c);
    double got = at<T>(d, r, b, p, c), e = fabs(got - v);
    e2 += e * e;
    r2 += v * v;
    me = !(e <= me) ? e : me;
    mr = fmax(mr, fabs(v));
    if (active) {
      e = fabs((double)(float)active[b * n + i] - act);
      ae2 += e * e;
      ar2 += act * act;
      ame = !(e <= ame) ? e : ame;
      amr = fmax(amr, fabs(act));
    }
  }
  finish(e2, r2, me, mr, acc);
  __syncthreads();
  finish(ae2, ar2, ame, amr, acc + 4);
}
__global__ void compare_sums(const double* sums, const float* got, long n, double* acc) {
  double e2 = 0, r2 = 0, me = 0, mr = 0;
  for (long i = blockIdx.x * 256L + threadIdx.x; i < n; i += gridDim.x * 256L) {
    double e = fabs(got[i] - sums[i]);
    e2 += e * e;
    r2 += sums[i] * sums[i];
    me = !(e <= me) ? e : me;
    mr = fmax(mr, fabs(sums[i]));
  }
  finish(e2, r2, me, mr, acc + 8);
}
// A hash of the bits, the same for any order of the additions.
__global__ void digest(const unsigned* p, long n, unsigned long long* h) {
  unsigned long long a = 0;
  for (long i = blockIdx.x * 256L + threadIdx.x; i < n; i += gridDim.x * 256L)
    a += (unsigned long long)(p[i]) * (2 * i + 1);
  atomicAdd(h, a);
}
