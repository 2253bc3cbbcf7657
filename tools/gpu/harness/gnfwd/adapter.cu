// Calls the GroupNorm forward kernels of a checkout for bench.cu. build.sh compiles it twice,
// against the headers of each checkout: with -DNEW and ENTRY=run_new for this one, and with
// -Djaxunet=jaxunet_old and ENTRY=run_old for the baseline, of which only the dispatch is called.
#include "call.h"
#include "group_norm/kernels.h"
#ifdef NEW
#include "group_norm/launch.h"
#endif
using namespace jaxunet;
static void fill(NormInput& p, const Call& c) {
  p.type = c.type == 0 ? Type::kFloat32 : c.type == 1 ? Type::kFloat16 : Type::kBfloat16;
  p.batch = c.batch;
  p.pixels = c.pixels;
  p.groups = c.groups;
  p.eps = 1e-5f;
  p.x.count = c.parts;
  p.x.total = 0;
  for (int i = 0; i < c.parts; ++i) {
    p.x.data[i] = c.x[i];
    p.x.channels[i] = c.channels[i];
    p.x.total += c.channels[i];
  }
  p.scale = {c.scale, c.row_stride};
  p.offset = {c.offset, c.row_stride};
}
// The kernels that the dispatch chooses. Without y, the statistics alone.
cudaError_t ENTRY(const Call& c, cudaStream_t s) {
  if (c.y) {
    NormForward p{};
    fill(p, c);
    p.silu = c.silu;
    p.y = c.y;
    p.mean = c.mean;
    p.inverse = c.inverse;
    return cuda::norm_forward(p, s);
  }
  NormStatistics p{};
  fill(p, c);
  p.a = c.a;
  p.b = c.b;
  p.mean = c.mean;
  p.inverse = c.inverse;
  return cuda::norm_statistics(p, s);
}
#ifdef NEW
cudaError_t new_statistics(const Call& c, int vectors, int threads, int ranks, cudaStream_t s) {
  NormInput p{};
  fill(p, c);
  const int v = cuda::vector_of(p.x, p.type);
  const auto t =
      statistics_tiling_of(vectors, threads, ranks, p.pixels, p.x.total, p.x.total / p.groups, v);
  return cuda::statistics(p, t, v, {c.a, c.b, c.mean, c.inverse}, s);
}
bool new_registers(const Call& c, int vectors, int k, int ranks, cudaStream_t s, bool run,
                   cudaError_t* e) {
  NormInput p{};
  fill(p, c);
  const int v = cuda::vector_of(p.x, p.type);
  const auto t =
      register_resident_tiling_of(vectors, k, p.pixels, p.x.total, p.x.total / p.groups, v, ranks);
  if (!t) return false;
  if (run)
    *e = cuda::register_resident_forward(
        p, *t, {{nullptr, nullptr, c.mean, c.inverse}, c.silu != 0, c.y}, s);
  return true;
}
bool new_streaming(const Call& c, int ranks, cudaStream_t s, bool run, cudaError_t* e) {
  NormInput p{};
  fill(p, c);
  const int v = cuda::vector_of(p.x, p.type), el = cuda::element_bytes(p.type);
  DeviceLimits l{132, 227 * 1024, 8};
  auto t = statistics_tiling(l, p.batch, p.pixels, p.x.total, p.x.total / p.groups, v, el);
  if (t && ranks)
    t = statistics_tiling_of(p.x.total / v, 512, ranks, p.pixels, p.x.total, p.x.total / p.groups,
                             v);
  const auto u = streaming_tiling(l, 0, p.batch, p.pixels, p.x.total, p.x.total / p.groups, v, el);
  if (!t || !u) return false;
  if (run)
    *e = cuda::streaming_forward(p, *t, second_pass_tiling(*u, l, p.batch), v,
                                 {{nullptr, nullptr, c.mean, c.inverse}, c.silu != 0, c.y}, s);
  return true;
}
#endif
