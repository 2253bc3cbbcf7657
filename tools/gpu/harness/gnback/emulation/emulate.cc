// Runs GroupNorm's backward_smem_resident.cu on the CPU, one host thread for each of its threads,
// and compares all results with float64. instructions.cuh, mailbox.cuh and special_functions.cuh
// replace the headers with its PTX. Shared memory starts as NaN, copies arrive only at the wait for
// them, and alignment, bounds and the pairs of cluster barriers are checked. ThreadSanitizer finds
// missing barriers.
//
//   tools/gpu/harness/gnback/emulation/run.sh     builds it twice, and runs both
//   emulate           all cases, in all types: without ThreadSanitizer
//   emulate short     few cases: with ThreadSanitizer
//
// Prints a line for each run with too large an error, or for all runs if $V is set, then the number
// of runs and of bad ones. The exit status is 1 if a run was bad; a violation that instructions.cuh
// detects aborts.
#include <numeric>
#include <random>

#include "kernel.cc"
using namespace jaxunet;
// The hash of dropout, as plan.h describes it.
static uint32_t mix(uint32_t w) {
  w = (w ^ (w >> 16)) * 0x85EBCA6Bu;
  w = (w ^ (w >> 13)) * 0xC2B2AE35u;
  return w ^ (w >> 16);
}
static int bad = 0, runs = 0;
// Checks a call. per_sample: each sample has its own scale and offset. own_units: channels of a
// block, in units of whole groups and vectors; ranks: blocks of a cluster; threads: roughly those
// of a block; smem: bytes of shared memory for the tiling; drops: with dropout.
template <class T>
void test(int batch, int pixels, std::vector<int> parts, int groups, bool silu, bool active,
          int added, bool per_sample, long own_units, int ranks, int threads, long smem,
          bool drops = false) {
  std::mt19937 rng(pixels * 7 + ranks);
  std::normal_distribution<float> nd;
  NormGradient p{};
  p.type = sizeof(T) == 4              ? Type::kFloat32
           : std::is_same_v<T, __half> ? Type::kFloat16
                                       : Type::kBfloat16;
  p.batch = batch;
  p.pixels = pixels;
  p.groups = groups;
  p.silu = silu;
  p.rounded = runs % 2 == 1;
  p.added_count = added;
  long C = 0;
  for (int c : parts) C += c;
  p.x.total = C;
  p.x.count = parts.size();
  const long np = (long)batch * pixels;
  std::vector<void*> mem;
  auto make = [&](long n, float mean) {
    T* q = (T*)aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
    mem.push_back(q);
    for (long i = 0; i < n; ++i) q[i] = static_cast<T>(mean + nd(rng));
    return (void*)q;
  };
  auto nan_of = [&](long n) {
    void* q = aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
    mem.push_back(q);
    memset(q, 0xff, n * sizeof(T));
    return q;
  };
  for (int i = 0; i < p.x.count; ++i) {
    p.x.channels[i] = parts[i];
    p.x.data[i] = make(np * parts[i], 0.3f);
  }
  p.dy = make(np * C, 0.1f);
  p.dx = p.x;
  for (int i = 0; i < p.x.count; ++i) p.dx.data[i] = nan_of(np * parts[i]);
  for (int k = 0; k < added; ++k) {
    p.added[k] = p.x;
    for (int i = 0; i < p.x.count; ++i) p.added[k].data[i] = make(np * parts[i], 0);
  }
  if (active) p.active = nan_of(np * C);
  std::vector<float> rows(4 * batch * C), sums(2 * batch * C, NAN);
  for (auto& r : rows) r = 1 + 0.2f * nd(rng);
  const long bc = batch * C;
  auto at = [&](const Parts& t, long b, long px, long c) {
    int i = 0;
    while (c >= t.channels[i]) c -= t.channels[i++];
    return (double)(float)((T*)t.data[i])[(b * pixels + px) * t.channels[i] + c];
  };
  const long gs = C / groups;
  for (int b = 0; b < batch; ++b)
    for (int g = 0; g < groups; ++g) {
      double s = 0, q = 0, n = (double)gs * pixels;
      for (long px = 0; px < pixels; ++px)
        for (long c = g * gs; c < (g + 1) * gs; ++c) {
          double v = at(p.x, b, px, c);
          s += v;
          q += v * v;
        }
      for (long c = g * gs; c < (g + 1) * gs; ++c) {
        rows[2 * bc + b * C + c] = s / n;
        rows[3 * bc + b * C + c] = 1 / sqrt(q / n - s / n * s / n + 1e-5);
      }
    }
  p.scale = {rows.data(), per_sample ? C : 0};
  p.offset = {rows.data() + bc, per_sample ? C : 0};
  p.mean = {rows.data() + 2 * bc, C};
  p.inverse = {rows.data() + 3 * bc, C};
  p.sums = sums.data();
  std::vector<uint32_t> seeds(2 * batch);
  for (auto& s : seeds) s = rng();
  const float factor = (float)static_cast<T>(1 / 0.7f);
  if (drops) p.dropout = {seeds.data(), uint32_t(0.3 * 65536), factor};
  const int full = 16 / sizeof(T);
  bool ok16 = true;
  for (int c : parts)
    if (c % full) ok16 = false;
  const int V = ok16 ? full : 1;
  const long unit = std::lcm<long>(gs, V);
  long own = unit * own_units;
  if (C % own) own = unit;
  const int rows_of_block = std::max<int>(threads / (own / V), 1);
  if (drops && (V == 1 || parts.size() > 1 || !silu || active || added)) abort();
  const BackwardTiling t =
      make_backward_tiling(smem, pixels, C, gs, V, sizeof(T), {own, ranks, rows_of_block});
  (void)cuda::smem_resident_gradient(p, t, V, nullptr);
  ++runs;
  double e[3] = {}, m[3] = {};
  auto see = [&](int k, double got, double want) {
    double d = fabs(got - want);
    e[k] = !(d <= e[k]) ? (std::isnan(d) ? 1e30 : d) : e[k];
    m[k] = fmax(m[k], fabs(want));
  };
  for (int b = 0; b < batch; ++b) {
    std::vector<double> s0(C), s1(C);
    auto dz = [&](long px, long c, double* n, double* a) {
      const long o = b * C + c;
      *n = (at(p.x, b, px, c) - rows[2 * bc + o]) * rows[3 * bc + o];
      const double z = rows[(per_sample ? o : c)] * *n + rows[bc + (per_sample ? o : c)],
                   given = (double)(float)((T*)p.dy)[(b * pixels + px) * C + c];
      const uint32_t at = px * C + c,
                     word =
                         mix(mix(at / 2 ^ seeds[2 * b]) + seeds[2 * b + 1]) >> at % 2 * 16 & 0xFFFF;
      const double dy = !drops ? given
                        : word < p.dropout.threshold
                            ? 0
                            : (double)(float)static_cast<T>(given * factor);
      if (!silu) {
        *a = z;
        return dy;
      }
      const double s = 1 / (1 + exp(-z));
      *a = z * s;
      return dy * (s + z * s * (1 - s));
    };
    double n, a;
    for (long px = 0; px < pixels; ++px)
      for (long c = 0; c < C; ++c) {
        const double d = dz(px, c, &n, &a);
        s0[c] += d;
        s1[c] += d * n;
      }
    for (long c = 0; c < C; ++c) {
      see(2, sums[2 * b * C + c], s0[c]);
      see(2, sums[(2 * b + 1) * C + c], s1[c]);
    }
    for (long px = 0; px < pixels; ++px)
      for (long c = 0; c < C; ++c) {
        const double d = dz(px, c, &n, &a);
        double g0 = 0, g1 = 0;
        for (long k = c / gs * gs; k < c / gs * gs + gs; ++k) {
          const double sc = rows[per_sample ? b * C + k : k];
          g0 += sc * s0[k];
          g1 += sc * s1[k];
        }
        double v = rows[3 * bc + b * C + c] *
                   (rows[per_sample ? b * C + c : c] * d - (g0 + n * g1) / (gs * pixels));
        for (int k = 0; k < added; ++k) v += at(p.added[k], b, px, c);
        see(0, at(p.dx, b, px, c), v);
        if (active) see(1, (double)(float)((T*)p.active)[(b * pixels + px) * C + c], a);
      }
  }
  const double eps = sizeof(T) == 4 ? 2e-6 : std::is_same_v<T, __half> ? 6e-4 : 4.5e-3;
  bool ok = e[0] <= eps * m[0] && e[1] <= eps * m[1] && e[2] <= 3e-6 * m[2];
  if (!ok) ++bad;
  if (!ok || getenv("V"))
    printf(
        "%s px %d C %ld g %d own %ld ranks %d thr %d chunks %d keep %d drops %d: dx %.1e/%.1e act "
        "%.1e/%.1e "
        "sums %.1e/%.1e %s\n",
        sizeof(T) == 4 ? "f32" : "16", pixels, C, groups, own, ranks, t.threads, t.chunks, t.keep,
        drops, e[0], m[0], e[1], m[1], e[2], m[2], ok ? "" : "BAD");
  for (void* q : mem) free(q);
}
template <class T>
void all() {
  test<T>(2, 64, {64}, 32, true, true, 2, false, 4, 1, 128, 231000);
  test<T>(2, 64, {64}, 32, true, true, 1, false, 4, 1, 64, 231000);
  test<T>(2, 49, {48, 24}, 12, true, true, 1, true, 2, 2, 64, 231000);
  test<T>(3, 50, {48, 48}, 16, true, false, 0, false, 1, 4, 64, 231000);
  test<T>(2, 121, {32, 16}, 6, false, true, 2, false, 1, 8, 32, 231000);
  test<T>(2, 35, {30}, 5, true, true, 0, false, 1, 1, 64, 231000);
  test<T>(2, 24, {3, 5, 4}, 3, true, true, 1, false, 1, 2, 32, 231000);
  test<T>(2, 300, {16}, 1, true, true, 2, false, 1, 1, 64, 12000);
  test<T>(2, 300, {40}, 1, true, true, 1, true, 1, 2, 64, 9000);
  test<T>(2, 2, {64}, 8, true, true, 1, false, 8, 1, 128, 231000);
  test<T>(1, 16, {144}, 1, true, true, 0, false, 1, 1, 64, 231000);
  test<T>(3, 200, {16}, 16, false, true, 1, false, 2, 8, 32, 231000);
  test<T>(2, 37, {16, 8}, 3, true, true, 2, false, 1, 8, 96, 231000);
  test<T>(5, 9, {512}, 32, true, true, 0, false, 4, 1, 256, 231000);
  test<T>(2, 64, {64}, 32, true, false, 0, false, 4, 1, 128, 231000, true);
  test<T>(2, 49, {72}, 12, true, false, 0, true, 2, 2, 64, 231000, true);
  test<T>(3, 121, {48}, 6, true, false, 0, false, 1, 8, 32, 231000, true);
  test<T>(2, 300, {16}, 1, true, false, 0, false, 1, 1, 64, 12000, true);
  test<T>(2, 300, {40}, 1, true, false, 0, true, 1, 2, 64, 9000, true);
  test<T>(5, 9, {512}, 32, true, false, 0, false, 4, 1, 256, 231000, true);
}
// Few cases, for ThreadSanitizer: clusters, chunks that are copied twice, dz kept in shared memory,
// odd numbers of pixels, and dropout.
static void few() {
  test<__nv_bfloat16>(2, 49, {16, 8}, 3, true, true, 1, false, 1, 2, 32, 231000);
  test<__nv_bfloat16>(2, 200, {16}, 16, false, true, 1, false, 2, 4, 32, 231000);
  test<__nv_bfloat16>(2, 300, {16}, 1, true, true, 2, false, 1, 1, 64, 12000);
  test<__nv_bfloat16>(2, 49, {16}, 2, true, false, 0, false, 1, 2, 32, 231000, true);
  test<__nv_bfloat16>(2, 300, {16}, 1, true, false, 0, false, 1, 1, 64, 12000, true);
}
int main(int count, char**) {
  if (count > 1) {
    few();
  } else {
    all<__nv_bfloat16>();
    all<__half>();
    all<float>();
  }
  printf("%d runs, %d bad\n", runs, bad);
  return bad > 0;
}
