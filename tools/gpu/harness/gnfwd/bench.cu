// Checks GroupNorm's forward kernels, with many tilings, against float64, and times them beside the
// kernels of another checkout, the baseline ("old"), on the calls of training steps of elephants64
// and cifar10, and of sampling. Needs a GPU of compute capability 9.0; XLA is not used.
//
//   sh tools/gpu/harness/gnfwd/build.sh OLD_CHECKOUT FOLDER
//   FOLDER/bench
//
// $OUT_DIR: folder to write full.txt to, which has the times of all tilings. $QUICK: times only the
// training step of elephants64, with batches of 32 and 256. $FIT: times all tilings of many batches
// and prints up to 48 per shape, to tell whether the tiling rules choose well.
//
// The checks compare every kernel's errors with those of the baseline, and two runs bit by bit, and
// look for writes beyond the outputs. They print a line WORSE or BAD for each failure, up to 11,
// and a summary.
//
// The timings have a line per shape: number of calls in a step, name, microseconds of the baseline
// and of the default tiling, their ratio (less than 1: faster than the baseline), GB/s, and the
// fastest tilings. Shapes with 0 calls are not part of a step. Then there are sums by image size
// ("level") and of the step; "best" takes the fastest tiling of each shape. Names: side of the
// image, channels of the parts of x, p: without SiLU, y: with SiLU. Tilings:
//   stream2      forward_streaming.cu with clusters of 2 blocks in its first launch; 0: the default
//   64B,k4r1     forward_register_resident.cu: bytes of a pixel in a block, pixels per thread,
//                blocks per cluster
//   d2t256r4     statistics.cu: clusters along the channels, threads per block, blocks per cluster
//
// The exit status is 1 if a check or a CUDA call failed. After 30 s SIGALRM ends the program.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../errors.cuh"
#include "../graph_times.cuh"
#include "../random.cuh"
#include "call.h"
using std::string;
using std::vector;

__global__ void copy16(const uint4* from, uint4* to, int64_t n) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
       i += (int64_t)gridDim.x * blockDim.x)
    to[i] = from[i];
}
struct RefArgs {
  int parts;
  void* x[4];
  int64_t channels[4];
};
// The forward pass in float64, one block per (group, sample). rs: distance of the samples' rows in
// scale and offset. y may be null.
template <class T>
__global__ void reference(RefArgs r, int64_t pixels, int64_t channels, int groups,
                          const float* scale, const float* offset, int64_t rs, int silu, double* y,
                          double* mean, double* inverse, double* a, double* b) {
  int64_t group = channels / groups, g0 = blockIdx.x * group, s = blockIdx.y;
  __shared__ double red[256];
  auto at = [&](int64_t p, int64_t c) {
    int64_t f = 0;
    int k = 0;
    while (c >= f + r.channels[k]) f += r.channels[k++];
    return (double)(float)(((const T*)r.x[k])[(s * pixels + p) * r.channels[k] + c - f]);
  };
  auto all = [&](auto fn) {
    double t = 0;
    for (int64_t i = threadIdx.x; i < pixels * group; i += 256)
      t += fn(at(i / group, g0 + i % group));
    red[threadIdx.x] = t;
    __syncthreads();
    for (int k = 128; k; k /= 2) {
      if (threadIdx.x < k) red[threadIdx.x] += red[threadIdx.x + k];
      __syncthreads();
    }
    double o = red[0];
    __syncthreads();
    return o;
  };
  double m = all([](double v) { return v; }) / (pixels * group),
         var = all([&](double v) { return (v - m) * (v - m); }) / (pixels * group),
         inv = 1 / sqrt(var + (double)1e-5f);
  for (int64_t c = g0 + threadIdx.x; c < g0 + group; c += 256) {
    double A = scale[s * rs + c] * inv;
    mean[s * channels + c] = m;
    inverse[s * channels + c] = inv;
    a[s * channels + c] = A;
    b[s * channels + c] = offset[s * rs + c] - m * A;
  }
  if (y)
    for (int64_t i = threadIdx.x; i < pixels * group; i += 256) {
      int64_t p = i / group, c = g0 + i % group;
      double z = scale[s * rs + c] * (at(p, c) - m) * inv + offset[s * rs + c];
      y[(s * pixels + p) * channels + c] = silu ? z / (1 + exp(-z)) : z;
    }
}
// Counts the words that differ.
__global__ void differ(const uint32_t* a, const uint32_t* b, int64_t n, unsigned* out) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
       i += (int64_t)gridDim.x * blockDim.x)
    if (a[i] != b[i]) atomicAdd(out, 1);
}

struct Shape {
  string name;
  int64_t side_h, side_w;
  vector<int64_t> parts;
  int groups;
  int silu;
  int y;               // 0: the statistics alone
  int64_t count;       // calls in a step
  int per_sample = 0;  // each sample has its own scale and offset
  float mean = 0;      // of x; 0: 0.5
  int64_t pixels() const { return side_h * side_w; }
  int64_t channels() const {
    int64_t c = 0;
    for (auto p : parts) c += p;
    return c;
  }
};
static uint64_t seed;
static cudaStream_t S;
static int esize(int t) { return t == 0 ? 4 : 2; }
// The arrays of a call, and the call. The outputs begin as NaN; the last 256 bytes of `out` lie
// beyond all of them and must stay as they are. With `source`, `src` is a copy of x, to write x
// again before each launch.
struct Buffers {
  Shape sh;
  int64_t batch;
  int type;
  char *x = nullptr, *src = nullptr;
  int64_t xbytes;
  float *scale, *offset;
  char* out;
  int64_t ybytes, rowbytes, outbytes;
  Call c;
  Buffers(const Shape& sh, int64_t batch, int type, bool source, uint64_t sd)
      : sh(sh), batch(batch), type(type) {
    int64_t C = sh.channels(), n = batch * sh.pixels() * C;
    xbytes = n * esize(type);
    int64_t padded = (xbytes + 255) / 256 * 256 + 4 * 256;
    CHECK(cudaMalloc(&x, padded));
    if (source) CHECK(cudaMalloc(&src, padded));
    char* to = source ? src : x;
    float mean = sh.mean != 0 ? sh.mean : 0.5f;
    by_type(type,
            [&](auto t) { fill_normal<<<512, 256, 0, S>>>((decltype(t)*)to, n, sd, mean, 1.0f); });
    if (source) CHECK(cudaMemcpyAsync(x, src, xbytes, cudaMemcpyDeviceToDevice, S));
    int64_t rows = sh.per_sample ? batch : 1;
    CHECK(cudaMalloc(&scale, rows * C * 4));
    CHECK(cudaMalloc(&offset, rows * C * 4));
    fill_normal<<<64, 256, 0, S>>>(scale, rows * C, sd + 1, 1.0f, 0.3f);
    fill_normal<<<64, 256, 0, S>>>(offset, rows * C, sd + 2, 0.0f, 0.5f);
    ybytes = sh.y ? (xbytes + 255) / 256 * 256 : 0;
    rowbytes = (batch * C * 4 + 255) / 256 * 256;
    outbytes = ybytes + 4 * rowbytes + 256;
    CHECK(cudaMalloc(&out, outbytes));
    CHECK(cudaMemsetAsync(out, 0xff, outbytes, S));
    c = {};
    c.type = type;
    c.batch = batch;
    c.pixels = sh.pixels();
    c.groups = sh.groups;
    c.parts = (int)sh.parts.size();
    int64_t at = 0;
    for (int i = 0; i < c.parts; ++i) {
      c.x[i] = x + at;
      c.channels[i] = sh.parts[i];
      at += batch * sh.pixels() * sh.parts[i] * esize(type);
    }
    c.scale = scale;
    c.offset = offset;
    c.row_stride = sh.per_sample ? C : 0;
    c.silu = sh.silu;
    c.y = sh.y ? out : nullptr;
    float* rows_at = (float*)(out + ybytes);
    c.mean = rows_at;
    c.inverse = rows_at + rowbytes / 4;
    c.a = rows_at + rowbytes / 2;
    c.b = rows_at + 3 * rowbytes / 4;
    if (sh.y) c.a = c.b = nullptr;
  }
  void release() {
    cudaFree(x);
    cudaFree(src);
    cudaFree(scale);
    cudaFree(offset);
    cudaFree(out);
  }
};
struct Variant {
  string name;
  std::function<cudaError_t(const Call&, cudaStream_t)> run;
};
static int64_t gcd64(int64_t a, int64_t b) { return b ? gcd64(b, a % b) : a; }
// The kernels and tilings that accept a shape. With `wide`, those to time: all that may be fast.
// Without, those to check: fewer, but also slow ones.
static vector<Variant> variants(const Shape& sh, const Buffers& b, bool wide) {
  vector<Variant> v;
  int64_t C = sh.channels(), V = 16 / esize(b.type), g = C / sh.groups;
  for (auto p : sh.parts)
    if (p % V) V = 1;
  const int64_t unit = g / gcd64(g, V), all = C / V;
  if (sh.y) {
    if (sh.pixels() >= 256)
      for (int r : {0, 1, 8}) {
        cudaError_t e;
        if (new_streaming(b.c, r, S, false, &e))
          v.push_back({"stream" + std::to_string(r), [r](const Call& c, cudaStream_t s) {
                         cudaError_t e = cudaErrorUnknown;
                         new_streaming(c, r, s, true, &e);
                         return e;
                       }});
      }
    if (V == 1 || g % 2) return v;
    for (int64_t u = unit; u <= all; u += unit) {
      if (all % u || (wide && u * 16 > 1024)) continue;
      for (auto [k, r] : {std::pair(2, 1), {4, 1}, {8, 1}, {8, 2}, {8, 4}, {8, 8}}) {
        cudaError_t e;
        if (!new_registers(b.c, u, k, r, S, false, &e)) continue;
        // Blocks that are sure to be slow, in clusters those of fewer than three warps, are left
        // out.
        const int64_t thr = u * ((sh.pixels() + k * r - 1) / (k * r));
        if (thr < (r > 1 ? 96 : wide ? 16 : 1) || (wide && k > sh.pixels())) continue;
        char n[64];
        snprintf(n, 64, "%dB,k%dr%d", (int)(u * 16), k, r);
        v.push_back({n, [u, k = k, r = r](const Call& c, cudaStream_t s) {
                       cudaError_t e = cudaErrorUnknown;
                       new_registers(c, (int)u, k, r, s, true, &e);
                       return e;
                     }});
      }
    }
  } else {
    for (int64_t d : {1, 2, 4, 8}) {
      const int64_t u = all / d;
      if (all % d || u % unit || (d > 1 && u * 16 < 32)) continue;
      for (int t : {128, 256, 512})
        for (int r : {1, 2, 4, 8}) {
          const int64_t threads = b.batch * d * r * t;
          if (u > t ||
              (wide ? threads < 132 * 24 || threads > 132 * 2048 * 3 : d == 4 || t == 256)) {
            continue;
          }
          char n[64];
          snprintf(n, 64, "d%dt%dr%d", (int)d, t, r);
          v.push_back({n, [u, t, r](const Call& c, cudaStream_t s) {
                         return new_statistics(c, (int)u, t, r, s);
                       }});
        }
    }
  }
  return v;
}
static unsigned* dev_cnt;
static int failures = 0, checks = 0;
static double worst_ratio[5];  // of y, mean, inverse, a, b: error / error of the baseline
static string worst_name[5];
// Checks the default and all variants. Allows twice the relative error of the baseline, but at
// least 6e-7, ten times the rounding of float32, and four times its largest error, but at least
// 4e-6.
static void check_case(const Shape& sh, int64_t batch, int type) {
  Buffers b(sh, batch, type, false, seed + 77 * checks);
  int64_t C = sh.channels(), n = batch * sh.pixels() * C;
  double *ry, *rm;
  CHECK(cudaMalloc(&ry, (sh.y ? n : 1) * 8));
  CHECK(cudaMalloc(&rm, 4 * batch * C * 8));
  double *rm_ = rm, *ri = rm + batch * C, *ra = ri + batch * C, *rb = ra + batch * C;
  RefArgs r{};
  r.parts = b.c.parts;
  for (int i = 0; i < r.parts; ++i) {
    r.x[i] = b.c.x[i];
    r.channels[i] = b.c.channels[i];
  }
  dim3 grid(sh.groups, batch);
  by_type(type, [&](auto t) {
    using T = decltype(t);
    reference<T><<<grid, 256, 0, S>>>(r, sh.pixels(), C, sh.groups, b.scale, b.offset,
                                      b.c.row_stride, sh.silu, sh.y ? ry : nullptr, rm_, ri, ra,
                                      rb);
  });
  CHECK(cudaGetLastError());
  auto errors = [&]() {
    vector<Error> e(1);
    if (sh.y) e[0] = by_type(type, [&](auto t) { return error_of((decltype(t)*)b.c.y, ry, n, S); });
    e.push_back(error_of(b.c.mean, rm_, batch * C, S));
    e.push_back(error_of(b.c.inverse, ri, batch * C, S));
    if (!sh.y) {
      e.push_back(error_of(b.c.a, ra, batch * C, S));
      e.push_back(error_of(b.c.b, rb, batch * C, S));
    }
    return e;
  };
  CHECK(run_old(b.c, S));
  CHECK(cudaStreamSynchronize(S));
  auto old = errors();
  char* again;
  CHECK(cudaMalloc(&again, b.outbytes));
  vector<Variant> vs = {{"default", run_new}};
  for (auto& v : variants(sh, b, false)) vs.push_back(v);
  for (auto& v : vs) {
    ++checks;
    CHECK(cudaMemsetAsync(b.out, 0xff, b.outbytes, S));
    CHECK(v.run(b.c, S));
    {
      cudaError_t e = cudaStreamSynchronize(S);
      if (e != cudaSuccess) {
        printf("CRASH %s b%d type%d %s: %s\n", sh.name.c_str(), (int)batch, type, v.name.c_str(),
               cudaGetErrorString(e));
        fflush(stdout);
        exit(1);
      }
    }
    auto now = errors();
    CHECK(cudaMemcpyAsync(again, b.out, b.outbytes, cudaMemcpyDeviceToDevice, S));
    CHECK(cudaMemsetAsync(b.out, 0xff, b.outbytes, S));
    CHECK(v.run(b.c, S));
    CHECK(cudaMemsetAsync(dev_cnt, 0, 4, S));
    differ<<<64, 256, 0, S>>>((uint32_t*)b.out, (uint32_t*)again, b.outbytes / 4, dev_cnt);
    unsigned d;
    CHECK(cudaMemcpyAsync(&d, dev_cnt, 4, cudaMemcpyDeviceToHost, S));
    unsigned char guard[256];
    CHECK(cudaMemcpyAsync(guard, b.out + b.outbytes - 256, 256, cudaMemcpyDeviceToHost, S));
    CHECK(cudaStreamSynchronize(S));
    bool g = true;
    for (auto x : guard) g &= x == 0xff;
    for (size_t k = 0; k < now.size(); ++k) {
      double floor = 3e-7, ratio = now[k].rel / fmax(old[k].rel, floor),
             rm = now[k].max / fmax(old[k].max, 1e-6);
      if (!(ratio < 1e30)) ratio = 1e30;
      if (ratio > worst_ratio[k]) {
        worst_ratio[k] = ratio;
        worst_name[k] = sh.name + (type == 0 ? " f32 " : type == 1 ? " f16 " : " bf16 ") + v.name;
      }
      if (!(ratio < 2) || !(rm < 4)) {
        if (++failures < 12)
          printf("WORSE %s b%d type%d %s out%d: rel %.3g (old %.3g) max %.3g (old %.3g)\n",
                 sh.name.c_str(), (int)batch, type, v.name.c_str(), (int)k, now[k].rel, old[k].rel,
                 now[k].max, old[k].max);
      }
    }
    if (d || !g) {
      if (++failures < 12)
        printf("BAD %s b%d type%d %s: %u words differ between runs, guard %d\n", sh.name.c_str(),
               (int)batch, type, v.name.c_str(), d, g);
    }
  }
  b.release();
  cudaFree(ry);
  cudaFree(rm);
  cudaFree(again);
}
struct Timed {
  string name;
  double us;
};
constexpr int kRounds = 7;
// Times the baseline, the default, and with `sweep` all variants, in bfloat16: microseconds per
// call, the median of several graph launches. With `copy`, each call follows a copy that writes x,
// as if the layer before had written it, so that x may be in the L2 cache; the time of the copies
// alone is subtracted.
static vector<Timed> time_case(const Shape& sh, int64_t batch, bool sweep, bool copy) {
  Buffers b0(sh, batch, 2, true, seed + 5), b1(sh, batch, 2, true, seed + 9);
  Buffers* bs[2] = {&b0, &b1};
  vector<Variant> vs;
  if (copy) vs.push_back({"copy", nullptr});
  vs.push_back({"old", run_old});
  vs.push_back({"default", run_new});
  if (sweep)
    for (auto& v : variants(sh, b0, true)) vs.push_back(v);
  int reps = std::max<int>(6, std::min<int>(24, (int)(200e6 / b0.xbytes)));
  reps = reps / 2 * 2;
  // Loads every kernel, which cannot be done during capture.
  copy16<<<264, 512, 0, S>>>((uint4*)b0.src, (uint4*)b0.x, b0.xbytes / 16);
  for (auto& v : vs)
    if (v.run) CHECK(v.run(b0.c, S));
  CHECK(cudaStreamSynchronize(S));
  vector<cudaGraphExec_t> ex;
  for (auto& v : vs)
    ex.push_back(graph_of(S, reps, [&](int i) {
      Buffers& b = *bs[i & 1];
      if (copy) copy16<<<264, 512, 0, S>>>((uint4*)b.src, (uint4*)b.x, b.xbytes / 16);
      return v.run ? v.run(b.c, S) : cudaSuccess;
    }));
  const auto t = times_in_turns(S, ex, reps, 1, kRounds);
  for (auto e : ex) CHECK(cudaGraphExecDestroy(e));
  vector<Timed> out;
  double base = 0;
  for (size_t i = 0; i < vs.size(); ++i) {
    double m = t[i][kRounds / 2];
    if (vs[i].name == "copy") {
      base = m;
      continue;
    }
    out.push_back({vs[i].name, m - base});
  }
  b0.release();
  b1.release();
  CHECK(cudaDeviceSynchronize());
  return out;
}
int main() {
  const bool fit = getenv("FIT");
  alarm(30);
  seed = (uint64_t)std::chrono::system_clock::now().time_since_epoch().count() % 1000003;
  printf("seed %llu\n", (unsigned long long)seed);
  CHECK(cudaStreamCreate(&S));
  CHECK(cudaMalloc(&dev_cnt, 4));
  auto t0 = std::chrono::steady_clock::now();
  auto secs = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
  };
  auto sq = [](const char* n, int64_t s, vector<int64_t> p, int silu, int y, int64_t count) {
    return Shape{n, s, s, p, 32, silu, y, count};
  };
  vector<Shape> ele = {sq("64_64", 64, {64}, 0, 0, 8),
                       sq("64_64+64", 64, {64, 64}, 0, 0, 2),
                       sq("64_128+64", 64, {128, 64}, 0, 0, 1),
                       sq("64_64y", 64, {64}, 1, 1, 0),
                       sq("64_64+64y", 64, {64, 64}, 1, 1, 0),
                       sq("64_128+64y", 64, {128, 64}, 1, 1, 0),
                       sq("32_64", 32, {64}, 1, 1, 1),
                       sq("32_128", 32, {128}, 1, 1, 6),
                       sq("32_128+64", 32, {128, 64}, 1, 1, 1),
                       sq("32_128+128", 32, {128, 128}, 1, 1, 1),
                       sq("32_192+128", 32, {192, 128}, 1, 1, 1),
                       sq("16_128", 16, {128}, 1, 1, 1),
                       sq("16_192", 16, {192}, 1, 1, 6),
                       sq("16_192p", 16, {192}, 0, 1, 5),
                       sq("16_192+128", 16, {192, 128}, 1, 1, 1),
                       sq("16_192+192", 16, {192, 192}, 1, 1, 1),
                       sq("16_256+192", 16, {256, 192}, 1, 1, 1),
                       sq("8_192", 8, {192}, 1, 1, 1),
                       sq("8_256", 8, {256}, 1, 1, 10),
                       sq("8_256p", 8, {256}, 0, 1, 6),
                       sq("8_256+192", 8, {256, 192}, 1, 1, 1),
                       sq("8_256+256", 8, {256, 256}, 1, 1, 2)};
  vector<Shape> cif = {sq("32_128", 32, {128}, 1, 1, 8),
                       sq("32_128+128", 32, {128, 128}, 1, 1, 2),
                       sq("32_256+128", 32, {256, 128}, 1, 1, 1),
                       sq("16_128", 16, {128}, 1, 1, 1),
                       sq("16_256", 16, {256}, 1, 1, 6),
                       sq("16_256p", 16, {256}, 0, 1, 5),
                       sq("16_256+128", 16, {256, 128}, 1, 1, 1),
                       sq("16_256+256", 16, {256, 256}, 1, 1, 2),
                       sq("8_256", 8, {256}, 1, 1, 7),
                       sq("8_256+256", 8, {256, 256}, 1, 1, 3),
                       sq("4_256", 4, {256}, 1, 1, 12),
                       sq("4_256+256", 4, {256, 256}, 1, 1, 3)};
  // Awkward shapes, with y and as statistics alone.
  vector<Shape> awk;
  auto both = [&](Shape s) {
    s.y = 1;
    awk.push_back(s);
    s.y = 0;
    s.name += "s";
    awk.push_back(s);
  };
  both({"3x5_6+10", 3, 5, {6, 10}, 4, 1, 1, 1, 1});
  both({"4x4_8", 4, 4, {8}, 4, 1, 1, 1});
  both({"7x5_30", 7, 5, {30}, 5, 0, 1, 1});
  both({"8x8_16+8", 8, 8, {16, 8}, 8, 1, 1, 1});
  both({"4x6_3+5+4", 4, 6, {3, 5, 4}, 3, 1, 1, 1});
  both({"5x3_3", 5, 3, {3}, 1, 1, 1, 1});
  both({"6x6_40", 6, 6, {40}, 40, 1, 1, 1});
  both({"4x4_144", 4, 4, {144}, 1, 1, 1, 1});
  both({"1x2_64", 1, 2, {64}, 8, 1, 1, 1});
  both({"1x1_64", 1, 1, {64}, 8, 1, 1, 1});
  both({"9x9_64m", 9, 9, {64}, 32, 1, 1, 1, 0, 1000.f});
  both({"33x35_128+64", 33, 35, {128, 64}, 32, 0, 1, 1});
  both({"23x22_256+192ps", 23, 22, {256, 192}, 32, 1, 1, 1, 1});
  both({"17x13_48+24g3", 17, 13, {48, 24}, 24, 1, 1, 1});
  both({"13x13_80g5", 13, 13, {80}, 16, 1, 1, 1});
  both({"5x7_1024g1", 5, 7, {1024}, 1, 1, 1, 1});
  both({"19x3_96g96", 19, 3, {96}, 96, 1, 1, 1});
  both({"48x45_96m", 48, 45, {96}, 32, 1, 1, 1, 0, 1000.f});
  for (auto& s : awk)
    for (int type = 0; type < 3; ++type) {
      if (s.mean == 1000.f && type != 0) continue;
      for (int64_t batch : fit ? vector<int64_t>{3} : vector<int64_t>{1, 3, 16})
        check_case(s, batch, type);
    }
  if (fit)
    ele.erase(std::remove_if(ele.begin(), ele.end(), [](auto& s) { return s.name.back() == 'p'; }),
              ele.end());
  auto some = ele;
  some.push_back(cif[0]);
  some.push_back(cif[10]);
  some.push_back(cif[11]);
  for (auto& s : some)
    for (int type = 0; type < 3; ++type) check_case(s, 3, type);
  printf(
      "checks %d, failures %d, %.1f s; worst error new/old (rel. norm): y %.2f (%s), mean %.2f "
      "(%s), inverse %.2f (%s), a %.2f, b %.2f (%s)\n",
      checks, failures, secs(), worst_ratio[0], worst_name[0].c_str(), worst_ratio[1],
      worst_name[1].c_str(), worst_ratio[2], worst_name[2].c_str(), worst_ratio[3], worst_ratio[4],
      worst_name[4].c_str());
  fflush(stdout);
  FILE* full = nullptr;
  if (const char* o = getenv("OUT_DIR")) full = fopen((string(o) + "/full.txt").c_str(), "w");
  auto table = [&](const char* title, vector<Shape>& shapes, int64_t batch, bool sweep, bool copy) {
    printf("== %s batch %d, us per launch %s: old, default, ratio | best of sweep  [%.1f s]\n",
           title, (int)batch, copy ? "after a copy that wrote x (copy subtracted)" : "back to back",
           secs());
    double so = 0, sn = 0, sb = 0, lo = 0, ln = 0, lb = 0;
    int64_t level = -1;
    auto flush_level = [&] {
      if (level >= 0)
        printf("   level %d: old %.1f default %.1f best %.1f us\n", (int)level, lo, ln, lb);
      lo = ln = lb = 0;
    };
    for (auto& s : shapes) {
      auto t = time_case(s, batch, sweep, copy);
      double o = t[0].us, n = t[1].us, best = n;
      if (s.side_h != level) {
        flush_level();
        level = s.side_h;
      }
      vector<Timed> sw(t.begin() + 2, t.end());
      std::sort(sw.begin(), sw.end(), [](auto& a, auto& b) { return a.us < b.us; });
      if (!sw.empty()) best = std::min(best, sw[0].us);
      so += o * s.count;
      sn += n * s.count;
      sb += best * s.count;
      lo += o * s.count;
      ln += n * s.count;
      lb += best * s.count;
      double bytes = (double)batch * s.pixels() * s.channels() * 2 * (s.y ? 2 : 1);
      printf("%2d x %-11s %6.2f %6.2f %.2f %5.0f GB/s |", (int)s.count, s.name.c_str(), o, n, n / o,
             bytes / n / 1e3);
      for (size_t i = 0; i < std::min<size_t>(fit || batch <= 16 ? 48 : 4, sw.size()); ++i)
        printf(" %s %.2f", sw[i].name.c_str(), sw[i].us);
      printf("\n");
      if (full) {
        fprintf(full, "%s b%d %s old %.2f default %.2f |", title, (int)batch, s.name.c_str(), o, n);
        for (auto& x : sw) fprintf(full, " %s %.2f", x.name.c_str(), x.us);
        fprintf(full, "\n");
      }
      fflush(stdout);
    }
    flush_level();
    printf("   SUM %s b%d: old %.1f default %.1f best %.1f us\n", title, (int)batch, so, sn, sb);
    fflush(stdout);
  };
  if (fit) {
    for (int64_t batch : {1, 8, 32, 64, 128, 256}) table("fit", ele, batch, true, batch > 8);
    table("fit", cif, 128, true, true);
    printf("done %.1f s\n", secs());
    return failures != 0;
  }
  table("elephants64", ele, 32, true, true);
  table("elephants64", ele, 256, true, true);
  if (!getenv("QUICK")) {
    table("cifar10", cif, 128, true, true);
    table("elephants64", ele, 64, false, true);
    table("elephants64", ele, 128, false, true);
    for (int64_t batch : {1, 8, 16}) table("sampling", ele, batch, true, false);
  }
  printf("done %.1f s\n", secs());
  if (full) fclose(full);
  return failures != 0;
}
