// Runs GroupNorm's forward_register_resident.cu and statistics.cu on the CPU, thread by thread,
// with several tilings per call, and compares all results with float64. make.py and emu.h replace
// CUDA and PTX. Shared memory and outputs start as NaN. Misaligned accesses, writes beyond shared
// memory or outputs, barriers that not all threads reach, and launches beyond the limits of a GPU
// end the program.
//
//   sh tools/gpu/harness/gnfwd/emulate.sh FOLDER     builds and runs it
//
// Prints the first failure, with exit status 1, or else the number of runs and the largest errors.
#include <random>
#include <string>

#include "emu.h"
#include "group_norm/forward_register_resident.cu"
#include "group_norm/statistics.cu"
namespace emu {
Thread* now;
ucontext_t scheduler;
dim3 block_dim;
std::vector<Block>* blocks;
int cluster_arrived, cluster_generation;
static const std::function<void()>* body;
static void entry() {
  (*body)();
  now->done = true;
  swapcontext(&now->context, &scheduler);
}
static std::vector<std::vector<char>> stacks;
// Runs one cluster (without `clusters`, one block) after another. Each thread runs until it waits
// for others (yield), then the next one does.
void run(const std::function<void()>& kernel, dim3 grid, int threads, int64_t smem_bytes,
         bool clusters) {
  body = &kernel;
  block_dim = dim3(threads);
  const int group = clusters ? grid.x : 1;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += group) {
        std::vector<Block> here(group);
        blocks = &here;
        cluster_arrived = cluster_generation = 0;
        std::vector<Warp> warps(group * threads / 32);
        std::vector<Thread> all(group * threads);
        while (stacks.size() < all.size()) stacks.emplace_back(32 * 1024);
        for (int b = 0; b < group; ++b) {
          here[b].smem.assign(smem_bytes + 16 + 64, (char)0xff);
          here[b].smem_bytes = smem_bytes;
          memset(here[b].statics, 0xff, 64);
          here[b].index = {x + b, y, z};
        }
        for (int b = 0; b < group; ++b)
          for (int t = 0; t < threads; ++t) {
            Thread& h = all[b * threads + t];
            h.block = &here[b];
            h.warp = &warps[(b * threads + t) / 32];
            h.lane = t % 32;
            h.index = {(unsigned)t, 0, 0};
            getcontext(&h.context);
            h.context.uc_stack.ss_sp = stacks[b * threads + t].data();
            h.context.uc_stack.ss_size = stacks[b * threads + t].size();
            h.context.uc_link = nullptr;
            makecontext(&h.context, entry, 0);
          }
        size_t left = all.size(), before = left;
        int stuck = 0;
        // A random order of all threads of the cluster, the same in each round.
        std::vector<size_t> order(all.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        static std::mt19937 r(7);
        std::shuffle(order.begin(), order.end(), r);
        while (left) {
          for (size_t i : order) {
            Thread& h = all[i];
            if (h.done) continue;
            now = &h;
            swapcontext(&scheduler, &h.context);
            if (h.done) --left;
          }
          if (left == before) {
            if (++stuck > 2000) fail("deadlock");
          } else
            stuck = 0;
          before = left;
        }
        for (auto& b : here) {
          char* end =
              reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(b.smem.data()) + 15) / 16 * 16) +
              smem_bytes;
          for (int i = 0; i < 48; ++i)
            if ((unsigned char)end[i] != 0xff) fail("wrote beyond shared memory");
        }
      }
}
}  // namespace emu
using namespace jaxunet;
// The hash of dropout, as plan.h describes it.
static uint32_t mix(uint32_t w) {
  w = (w ^ (w >> 16)) * 0x85EBCA6Bu;
  w = (w ^ (w >> 13)) * 0xC2B2AE35u;
  return w ^ (w >> 16);
}
static double worst[6];  // errors of mean, inverse, a, b; y in float32; y in 16 bits
static int runs;
// Checks both kernels for a call, with the default tiling and others. per_sample: each sample has
// its own scale and offset.
template <class T>
void one(int64_t batch, int64_t pixels, std::vector<int64_t> parts, int64_t groups, bool per_sample,
         float mean, bool silu) {
  int64_t C = 0;
  for (auto p : parts) C += p;
  const int64_t g = C / groups;
  std::mt19937 rng(runs + 11);
  std::normal_distribution<float> n(mean, 1), m(0, 1);
  std::vector<T*> data;
  std::vector<std::vector<char>> hold;
  NormInput p{};
  for (auto c : parts) {
    hold.emplace_back((batch * pixels * c) * sizeof(T) + 512 + 16, (char)0xff);
    char* a = (char*)((((uintptr_t)hold.back().data()) + 256 + 15) / 16 * 16);
    data.push_back((T*)a);
    for (int64_t i = 0; i < batch * pixels * c; ++i) data.back()[i] = static_cast<T>(n(rng));
  }
  const int64_t rows = per_sample ? batch : 1;
  std::vector<float> scale(rows * C), offset(rows * C);
  for (auto& s : scale) s = 1 + .3f * m(rng);
  for (auto& s : offset) s = .5f * m(rng);
  p.type = sizeof(T) == 4              ? Type::kFloat32
           : std::is_same_v<T, __half> ? Type::kFloat16
                                       : Type::kBfloat16;
  p.batch = batch;
  p.pixels = pixels;
  p.groups = groups;
  p.eps = 1e-5f;
  p.x.count = parts.size();
  p.x.total = C;
  for (size_t i = 0; i < parts.size(); ++i) {
    p.x.data[i] = data[i];
    p.x.channels[i] = parts[i];
  }
  p.scale = {scale.data(), per_sample ? C : 0};
  p.offset = {offset.data(), per_sample ? C : 0};
  std::vector<double> rm(batch * groups), ri(batch * groups);
  auto at = [&](int64_t s, int64_t q, int64_t c) {
    size_t k = 0;
    while (c >= parts[k]) c -= parts[k++];
    return (double)static_cast<float>(data[k][(s * pixels + q) * parts[k] + c]);
  };
  for (int64_t s = 0; s < batch; ++s)
    for (int64_t k = 0; k < groups; ++k) {
      double t = 0, v = 0;
      for (int64_t q = 0; q < pixels; ++q)
        for (int64_t c = 0; c < g; ++c) t += at(s, q, k * g + c);
      t /= pixels * g;
      for (int64_t q = 0; q < pixels; ++q)
        for (int64_t c = 0; c < g; ++c) v += pow(at(s, q, k * g + c) - t, 2);
      rm[s * groups + k] = t;
      ri[s * groups + k] = 1 / sqrt(v / (pixels * g) + 1e-5);
    }
  const int v = cuda::vector_of(p.x, p.type);
  std::vector<float> out(4 * batch * C + 8);
  // Checks the statistics in `out`: mean, inverse and, with `ab`, a and b.
  auto check = [&](const char* what, const std::string& tile, bool ab) {
    ++runs;
    double e[4] = {};
    for (int64_t s = 0; s < batch; ++s)
      for (int64_t c = 0; c < C; ++c) {
        double M = rm[s * groups + c / g], I = ri[s * groups + c / g],
               A = scale[(per_sample ? s * C : 0) + c] * I,
               B = offset[(per_sample ? s * C : 0) + c] - M * A;
        double ref[4] = {M, I, A, B};
        for (int k = 0; k < (ab ? 4 : 2); ++k) {
          double d = fabs(out[k * batch * C + s * C + c] - ref[k]) / (fabs(ref[k]) +
                                                                      (k == 3   ? fabs(M * A)
                                                                       : k == 0 ? 1
                                                                                : 0) +
                                                                      1e-3);
          if (!(d < 1e-5)) {
            printf(
                "WRONG %s %s batch %d pixels %d C %d groups %d type %d out %d sample %d channel "
                "%d: %g not %g\n",
                what, tile.c_str(), (int)batch, (int)pixels, (int)C, (int)groups, (int)p.type, k,
                (int)s, (int)c, out[k * batch * C + s * C + c], ref[k]);
            exit(1);
          }
          e[k] = fmax(e[k], d);
        }
      }
    for (int k = 0; k < 4; ++k) worst[k] = fmax(worst[k], e[k]);
    for (int i = 0; i < 8; ++i)
      if (!std::isnan(out[4 * batch * C + i])) {
        printf("WRONG: wrote beyond\n");
        exit(1);
      }
  };
  const DeviceLimits h200{132, 227 * 1024, 8};
  const int el = sizeof(T);
  const int64_t all = C / v, unit = std::lcm<int64_t>(g, v) / v;
  std::vector<StatisticsTiling> ts;
  if (auto t = statistics_tiling(h200, batch, pixels, C, g, v, el)) ts.push_back(*t);
  for (int ranks : {1, 2, 8})
    if (all <= 256) {
      ts.push_back(statistics_tiling_of(all, 256, ranks, pixels, C, g, v));
      if (all % (2 * unit) == 0)
        ts.push_back(statistics_tiling_of(all / 2, 512, ranks, pixels, C, g, v));
    }
  for (auto& t : ts) {
    for (auto& f : out) f = NAN;
    cuda::statistics(p, t, v, {&out[2 * batch * C], &out[3 * batch * C], &out[0], &out[batch * C]},
                     nullptr);
    check("statistics", std::to_string(t.ranks) + "x" + std::to_string(t.block.vectors), true);
  }
  if (v == 1 || g % 2) return;
  std::vector<RegisterResidentTiling> rs;
  if (auto t = register_resident_tiling(h200, batch, pixels, C, g, v, el)) rs.push_back(*t);
  for (int64_t u = unit; u <= all; u += unit)
    if (all % u == 0)
      for (int k : {2, 4, 8})
        if (auto t = register_resident_tiling_of(u, k, pixels, C, g, v))
          if (rs.size() < 7) rs.push_back(*t);
  if (auto t = register_resident_cluster_tiling(h200, pixels, C, g, v, el)) rs.push_back(*t);
  for (int ranks : {2, 8})
    if (auto t = register_resident_tiling_of(unit, 8, pixels, C, g, v, ranks)) rs.push_back(*t);
  // Each tiling without dropout and, if the kernel supports it for this call, with it.
  std::vector<uint32_t> seeds(2 * batch);
  for (auto& s : seeds) s = rng();
  const float factor = static_cast<float>(static_cast<T>(1 / 0.7f));
  const Dropout dropout{seeds.data(), uint32_t(0.3 * 65536), factor};
  const size_t plain = rs.size();
  if (silu && parts.size() == 1)
    for (size_t i = 0; i < plain; ++i) rs.push_back(rs[i]);
  for (size_t i = 0; i < rs.size(); ++i) {
    const auto& t = rs[i];
    const bool drops = i >= plain;
    for (auto& f : out) f = NAN;
    std::vector<char> hy(batch * pixels * C * sizeof(T) + 64, (char)0xff);
    T* y = (T*)((((uintptr_t)hy.data()) + 15) / 16 * 16);
    cuda::register_resident_forward(
        p, t, {{nullptr, nullptr, &out[0], &out[batch * C]}, silu, y, drops ? dropout : Dropout{}},
        nullptr);
    check("registers",
          std::to_string(t.block.vectors) + "x" + std::to_string(t.thread_pixels) + "x" +
              std::to_string(t.ranks),
          false);
    for (int64_t s = 0; s < batch; ++s)
      for (int64_t q = 0; q < pixels; ++q)
        for (int64_t c = 0; c < C; ++c) {
          double z = scale[(per_sample ? s * C : 0) + c] * (at(s, q, c) - rm[s * groups + c / g]) *
                         ri[s * groups + c / g] +
                     offset[(per_sample ? s * C : 0) + c],
                 r = silu ? z / (1 + exp(-z)) : z;
          if (drops) {
            const uint32_t at = q * C + c,
                           word = mix(mix(at / 2 ^ seeds[2 * s]) + seeds[2 * s + 1]);
            r = (word >> at % 2 * 16 & 0xFFFF) < dropout.threshold ? 0 : r * factor;
            if (r == 0 && static_cast<float>(y[(s * pixels + q) * C + c]) != 0) {
              printf("WRONG y: not dropped\n");
              exit(1);
            }
          }
          double d = fabs(static_cast<float>(y[(s * pixels + q) * C + c]) - r) / (1 + fabs(r));
          if (!(d < (drops ? 1.5 : 1) * (sizeof(T) == 4             ? 3e-6
                                         : p.type == Type::kFloat16 ? 1e-3
                                                                    : 6e-3))) {
            printf("WRONG y: pixels %d C %d groups %d: %g not %g\n", (int)pixels, (int)C,
                   (int)groups, static_cast<float>(y[(s * pixels + q) * C + c]), r);
            exit(1);
          }
          worst[4 + (sizeof(T) == 2)] = fmax(worst[4 + (sizeof(T) == 2)], d);
        }
    for (char* c = (char*)(y + batch * pixels * C); c < hy.data() + hy.size(); ++c)
      if ((unsigned char)*c != 0xff) {
        printf("WRONG: y beyond\n");
        exit(1);
      }
  }
}
template <class T>
void types(bool big) {
  struct S {
    int64_t batch, pixels;
    std::vector<int64_t> parts;
    int64_t groups;
    bool ps;
    float mean;
  };
  std::vector<S> shapes = {{2, 15, {8, 16}, 4, true, .5},
                           {1, 16, {8}, 4, false, .5},
                           {1, 35, {40}, 5, false, .5},
                           {2, 64, {16, 8}, 8, false, 0},
                           {2, 24, {3, 5, 4}, 3, false, .5},
                           {2, 15, {3}, 1, false, 0},
                           {1, 36, {40}, 40, false, 0},
                           {1, 16, {144}, 1, false, .5},
                           {2, 2, {64}, 8, true, .5},
                           {2, 1, {64}, 8, false, .5},
                           {1, 81, {64}, 32, false, sizeof(T) == 4 ? 1000.f : 3.f},
                           {1, 64, {256, 192}, 32, false, .5},
                           {1, 64, {256, 256}, 32, false, .5},
                           {1, 64, {192}, 32, true, .5},
                           {1, 35, {1024}, 1, true, .5},
                           {1, 57, {96}, 96, false, .5},
                           {1, 169, {80}, 16, false, .5},
                           {1, 221, {48, 24}, 24, false, .5},
                           {3, 16, {256}, 32, false, .5}};
  if (big)
    for (auto& s : std::vector<S>{{1, 256, {192}, 32, false, .5},
                                  {1, 256, {256, 192}, 32, false, .5},
                                  {1, 256, {192, 128}, 32, false, .5},
                                  {1, 1024, {128}, 32, false, .5},
                                  {1, 1155, {128, 64}, 32, false, .5},
                                  {1, 4096, {64}, 32, false, .5}})
      shapes.push_back(s);
  for (auto& s : shapes)
    one<T>(s.batch, s.pixels, s.parts, s.groups, s.ps, s.mean, true),
        one<T>(s.batch, s.pixels, s.parts, s.groups, s.ps, s.mean, false);
}
int main() {
  types<__nv_bfloat16>(true);
  types<float>(true);
  types<__half>(false);
  printf(
      "%d runs right; worst relative error: mean %.2g inverse %.2g a %.2g b %.2g, y float32 %.2g, "
      "y 16 bits %.2g\n",
      runs, worst[0], worst[1], worst[2], worst[3], worst[4], worst[5]);
}
