// The checks of bench.cu: the kernel in all types, with awkward shapes and several tilings each.
// Compares its errors against float64 with those of the baseline, the outputs of two runs by a hash
// of their bits, and the gradients of scale and offset with the sums that the kernel wrote.
#pragma once

#include "reference.cuh"

// Prints the first bad checks and a summary. Returns the number of bad checks.
static int check_all(unsigned seed) {
  const std::vector<Shape> shapes = {{1, 3, 64, {64}, 32, true, true, 2, false},
                                     {1, 2, 64, {128, 64}, 32, true, true, 1, true},
                                     {1, 2, 32, {192, 128}, 32, true, true, 1, false},
                                     {1, 2, 32, {128}, 32, true, true, 0, true},
                                     {1, 3, 16, {256, 192}, 32, true, true, 1, true},
                                     {1, 3, 16, {192}, 32, false, false, 1, true},
                                     {1, 3, 8, {256, 192}, 32, true, true, 1, false},
                                     {1, 3, 8, {256}, 32, false, false, 2, true},
                                     {1, 3, 4, {512}, 32, true, true, 0, true},
                                     {1, 2, 33, {128, 64}, 32, true, false, 1, true},
                                     {1, 3, 5, {30}, 5, false, true, 0, true},
                                     {1, 2, 5, {3, 5, 4}, 3, true, true, 1, true},
                                     {1, 2, 9, {64}, 1, true, true, 1, true},
                                     {1, 2, 21, {256, 192}, 32, true, true, 2, true},
                                     {1, 2, 50, {128, 64}, 1, true, true, 1, true},
                                     {1, 1, 4, {144}, 1, true, true, 0, true},
                                     {1, 2, 3, {33, 30}, 9, true, true, 2, true}};
  char* pool;
  CHECK(cudaMalloc(&pool, 256u << 20));
  double *acc, *sums, *dm, *di;
  unsigned long long* h;
  CHECK(cudaMalloc(&acc, 200));
  CHECK(cudaMalloc(&sums, 8u << 20));
  CHECK(cudaMalloc(&dm, 1 << 20));
  CHECK(cudaMalloc(&di, 1 << 20));
  CHECK(cudaMalloc(&h, 16));
  float* rows;
  CHECK(cudaMalloc(&rows, 4 << 20));
  int bad = 0, done = 0;
  double worst[3] = {0, 0, 0};
  for (size_t i = 0; i < shapes.size(); ++i)
    for (int ty = 0; ty < 3; ++ty) {
      const Shape& s = shapes[i];
      const Type type = (Type)ty;
      const bool per_sample = i % 3 == 1;
      const float mean = ty == 0 && i % 4 == 0 ? 100.0f : 0.3f;
      Memory in{pool, 128u << 20, 0}, out{pool + (128u << 20), 128u << 20, 0};
      NormGradient p = make_plan(s, type, in, out, per_sample, rows);
      p.rounded = ty == 2 && i % 2 == 0;  // then errors may be as large as those of rounding dy
      const long C = p.x.total, np = p.batch * p.pixels, bc = p.batch * C;
      const unsigned long long sd = seed + 97 * (3 * i + ty);
      auto put = [&](void* q, long n, float m, float d, int k) {
        by_type(ty, [&](auto t) { fill_host<decltype(t)>(q, n, sd + k, m, d); });
      };
      for (int k = 0; k < p.x.count; ++k) {
        put(p.x.data[k], np * p.x.channels[k], mean, 1.5f, k);
        for (int a = 0; a < s.added; ++a)
          put(p.added[a].data[k], np * p.x.channels[k], 0, 1, 10 + 4 * a + k);
      }
      put(const_cast<void*>(p.dy), np * C, 0.1f, 1, 30);
      fill_host<float>(rows, bc, sd + 40, 1, 0.3f);
      fill_host<float>(rows + bc, bc, sd + 41, 0, 0.5f);
      Ref r{(int)p.batch,
            (int)p.pixels,
            (int)C,
            (int)p.groups,
            p.x.count,
            {},
            {},
            {},
            s.added,
            p.dy,
            p.scale.data,
            p.offset.data,
            per_sample ? (int)C : 0,
            dm,
            di,
            s.silu};
      for (int k = 0; k < p.x.count; ++k) {
        r.pc[k] = (int)p.x.channels[k];
        r.x[k] = p.x.data[k];
        for (int a = 0; a < s.added; ++a) r.added[a][k] = p.added[a].data[k];
      }
      const dim3 gg(p.groups, p.batch), gc(C, p.batch), gd(64, p.batch);
      by_type(ty, [&](auto t) {
        using T = decltype(t);
        ref_stats<T><<<gg, 256, 0, st>>>(r, dm, di, rows + 2 * bc, rows + 3 * bc, 1e-5);
        ref_sums<T><<<gc, 256, 0, st>>>(r, sums);
      });
      CHECK(cudaGetLastError());
      const int vector = vector_for(p.x, type);
      // Runs a kernel into outputs filled with NaN. e: relative norm of the error and largest error
      // relative to the largest value, for dx, active and sums; hh: a hash of all outputs.
      auto measure = [&](const std::function<cudaError_t()>& run, double* e,
                         unsigned long long* hh) {
        CHECK(cudaMemsetAsync(out.base, 0xff, out.used, st));
        const cudaError_t err = run();
        if (err != cudaSuccess) return err;
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(st));
        CHECK(cudaMemsetAsync(acc, 0, 200, st));
        by_type(ty, [&](auto t) {
          compare_dx<<<gd, 256, 0, st>>>(r, sums, p.dx, (const decltype(t)*)p.active, acc);
        });
        compare_sums<<<8, 256, 0, st>>>(sums, p.sums, 2 * bc, acc);
        CHECK(cudaMemsetAsync(h, 0, 8, st));
        digest<<<64, 256, 0, st>>>((unsigned*)out.base, out.used / 4, h);
        double a[12];
        CHECK(cudaMemcpyAsync(a, acc, 96, cudaMemcpyDeviceToHost, st));
        CHECK(cudaMemcpyAsync(hh, h, 8, cudaMemcpyDeviceToHost, st));
        CHECK(cudaStreamSynchronize(st));
        for (int k = 0; k < 3; ++k) {
          e[2 * k] = a[4 * k + 1] > 0 ? sqrt(a[4 * k] / a[4 * k + 1]) : 0;
          e[2 * k + 1] = a[4 * k + 3] > 0 ? a[4 * k + 2] / a[4 * k + 3] : 0;
        }
        return cudaSuccess;
      };
      double eo[6], en[6];
      unsigned long long h0, h1, h2;
      CHECK(measure([&] { return old_gradient(p, st); }, eo, &h0));
      // The default tiling and others, the last two with so little shared memory that chunks leave
      // it and are copied again.
      const long unit = std::lcm<long>(C / p.groups, vector);
      std::vector<BackwardTiling> tests = {backward_tiling({132, 232448, 8}, p.batch, p.pixels, C,
                                                           C / p.groups, vector,
                                                           (int)bytes_of(type), s.added)};
      for (int k = 0; k < 9; ++k) {
        const long own = C % (unit << (k % 3)) ? unit : unit << (k % 3);
        const int ranks = k % 4 == 1 ? 8 : k % 4 == 2 ? 2 : 1;
        const int rows = std::max<int>(std::min<long>((k < 4   ? 256
                                                       : k < 6 ? 512
                                                               : 96),
                                                      kBackwardThreads) *
                                           vector / own,
                                       1);
        const BackwardTiling t = tiling_of(p, vector, {own, ranks, rows}, k < 7 ? 232448 : 24000);
        if (fits(t)) tests.push_back(t);
      }
      for (const BackwardTiling& t : tests) {
        const cudaError_t err = measure([&] { return run_new(p, t, vector); }, en, &h1);
        if (err != cudaSuccess) {
          printf("check %zu type %d %s: launch %s\n", i, ty, name_of(t, vector).c_str(),
                 cudaGetErrorString(err));
          cudaGetLastError();
          ++bad;
          continue;
        }
        if (s.samples) {
          std::vector<float> hs(2 * bc), a(bc), o(bc);
          CHECK(cudaMemcpy(hs.data(), p.sums, 8 * bc, cudaMemcpyDeviceToHost));
          CHECK(cudaMemcpy(a.data(), p.dscale, 4 * bc, cudaMemcpyDeviceToHost));
          CHECK(cudaMemcpy(o.data(), p.doffset, 4 * bc, cudaMemcpyDeviceToHost));
          double err = 0, ref = 1e-30;
          for (int w = 0; w < 2; ++w)
            for (long c = 0; c < C; ++c) {
              double total = 0;
              for (long i = 0; i < p.batch; ++i) {
                const double v = hs[(2 * i + w) * C + c];
                total += v;
                if (per_sample) {
                  const double g = (w ? a : o)[i * C + c];
                  err = !(std::fabs(g - v) <= err) ? std::fabs(g - v) : err;
                }
              }
              ref = std::max(ref, std::fabs(total));
              if (!per_sample) {
                const double g = (w ? a : o)[c];
                err = !(std::fabs(g - total) <= err) ? std::fabs(g - total) : err;
              }
            }
          if (!(err <= 1e-6 * ref)) {
            printf("check %zu type %d %s: parameter gradients off by %.2e of %.2e\n", i, ty,
                   name_of(t, vector).c_str(), err, ref);
            ++bad;
          }
        }
        double e2[6];
        CHECK(measure([&] { return run_new(p, t, vector); }, e2, &h2));
        bool ok = h1 == h2;
        const double floor32 = p.rounded ? 3e-3 : 2e-6;
        for (int k = 0; k < 6; ++k) {
          if (k / 2 == 1 && !s.active) continue;
          if (!(en[k] <= 1.3 * eo[k] + floor32)) ok = false;
          worst[ty] = std::max(worst[ty], en[k] / (eo[k] + floor32));
        }
        ++done;
        if (!ok && ++bad <= 12)
          printf(
              "check %zu type %d %s chunks %d: BAD bits %d dx %.2e/%.2e (max %.2e/%.2e) act "
              "%.2e/%.2e sums %.2e/%.2e\n",
              i, ty, name_of(t, vector).c_str(), t.chunks, h1 == h2, en[0], eo[0], en[1], eo[1],
              en[2], eo[2], en[4], eo[4]);
      }
    }
  printf("check: %d runs, %d bad; worst new/old error f32 %.2f f16 %.2f bf16 %.2f\n", done, bad,
         worst[0], worst[1], worst[2]);
  CHECK(cudaFree(pool));
  return bad;
}
