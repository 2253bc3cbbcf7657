// Helpers of bench.cu and check.cuh: shapes, plans whose arrays are carved from one
// allocation, and timing in a CUDA graph. `old` is the baseline, `new` the kernel of this checkout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "../graph_times.cuh"
#include "../random.cuh"
#include "backward_smem_resident_tiling.h"
#include "launch.h"
#include "plan.h"

// The baseline's entry point. Its types are only declared, because its headers would collide with
// those of this checkout.
namespace jaxunet_old {
struct NormGradient;
enum class KernelSet : int;
namespace cuda {
cudaError_t norm_gradient(const NormGradient& plan, cudaStream_t stream, KernelSet kernels);
}
}  // namespace jaxunet_old
using namespace jaxunet;
// The cast relies on the same layout of both NormGradients.
static cudaError_t old_gradient(const NormGradient& p, cudaStream_t s) {
  return jaxunet_old::cuda::norm_gradient(reinterpret_cast<const jaxunet_old::NormGradient&>(p), s,
                                          jaxunet_old::KernelSet{0});  // kFastest
}
using jaxunet::cuda::launch_parameter_gradients;

struct Shape {
  int count, batch, side;  // calls in a step; samples; width and height of the images
  std::vector<int> parts;  // channels of the parts of x
  int groups;
  bool silu, active;   // active: the kernel also writes y
  int added;           // tensors added to dx
  bool samples;        // the gradients of scale and offset are computed, too
  bool drops = false;  // dropout, at a rate of 0.1
};
static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static cudaStream_t st;

template <class T>
void fill_host(void* p, long n, unsigned long long seed, float mean, float dev) {
  fill_normal<T><<<1024, 256, 0, st>>>((T*)p, n, seed, mean, dev);
}

static long bytes_of(Type t) { return t == Type::kFloat32 ? 4 : 2; }
static int vector_for(const Parts& x, Type t) { return jaxunet::cuda::vector_of(x, t); }

// Memory to carve arrays from, one after another.
struct Memory {
  char* base;
  size_t size, used;
  void* take(size_t n) {
    n = (n + 255) / 256 * 256;
    if (used + n > size) {
      printf("FAIL out of carved memory\n");
      exit(1);
    }
    void* p = base + used;
    used += n;
    return p;
  }
};
// rows: scale, offset, mean and inverse in this order, with room for (batch, channels) each. Their
// bits are also the seeds of dropout.
static NormGradient make_plan(const Shape& s, Type type, Memory& in, Memory& out, bool per_sample,
                              float* rows) {
  NormGradient p{};
  p.type = type;
  p.batch = s.batch;
  p.pixels = (long)s.side * s.side;
  p.groups = s.groups;
  p.silu = s.silu;
  p.rounded = s.silu && !s.drops;  // as in training
  p.added_count = s.added;
  long C = 0;
  for (int c : s.parts) C += c;
  p.x.total = C;
  p.x.count = (int)s.parts.size();
  const long e = bytes_of(type), np = p.batch * p.pixels;
  for (int i = 0; i < p.x.count; ++i) {
    p.x.channels[i] = s.parts[i];
    p.x.data[i] = in.take(np * s.parts[i] * e);
  }
  p.dy = in.take(np * C * e);
  p.dx = p.x;
  for (int k = 0; k < s.added; ++k) {
    p.added[k] = p.x;
    for (int i = 0; i < p.x.count; ++i) p.added[k].data[i] = in.take(np * s.parts[i] * e);
  }
  for (int i = 0; i < p.x.count; ++i) p.dx.data[i] = out.take(np * s.parts[i] * e);
  if (s.active) p.active = out.take(np * C * e);
  p.sums = (float*)out.take(p.batch * 2 * C * 4);
  p.parameter_gradients = s.samples;
  p.dscale = (float*)out.take(p.batch * C * 4);
  p.doffset = (float*)out.take(p.batch * C * 4);
  const long bc = p.batch * C;
  p.scale = {rows, per_sample ? C : 0};
  p.offset = {rows + bc, per_sample ? C : 0};
  p.mean = {rows + 2 * bc, C};
  p.inverse = {rows + 3 * bc, C};
  if (s.drops) p.dropout = {reinterpret_cast<const uint32_t*>(rows), 6554, 1.109375f};
  return p;
}
// The microseconds of a call: the median of `reps` launches of a graph of `nodes` calls, which
// rotate over `sets` sets of arrays.
static double time_us(const std::function<cudaError_t(int)>& run, int sets, int nodes, int reps) {
  return graph_times(st, nodes, 1, reps, [&](int i) { return run(i % sets); })[reps / 2];
}
static cudaError_t run_new(const NormGradient& p, const BackwardTiling& t, int vector) {
  const cudaError_t e = jaxunet::cuda::smem_resident_gradient(p, t, vector, st);
  return e == cudaSuccess ? launch_parameter_gradients(p, st) : e;
}
static BackwardTiling tiling_of(const NormGradient& p, int vector, const BackwardChoice& choice,
                                long smem = 232448) {
  return make_backward_tiling(smem, p.pixels, p.x.total, p.x.total / p.groups, vector,
                              (int)bytes_of(p.type), choice);
}
static bool fits(const BackwardTiling& t) {
  return t.stage_bytes + t.scratch_bytes <= 232448 && t.threads <= kBackwardThreads;
}
static std::string name_of(const BackwardTiling& t, int vector) {
  char b[80];
  snprintf(b, 80, "%d/%d/%d%s", t.vectors * vector, t.ranks, t.rows, t.keep ? "K" : "");
  return b;
}
