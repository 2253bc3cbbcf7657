// Checks GroupNorm's backward_smem_resident.cu (check.cuh), and times all its tilings on the calls
// of the training steps of elephants64 (batch 256 and 32) and cifar10 (batch 128; shapes.inc), in
// bfloat16. The baseline is norm_gradient of another checkout, which chooses among the kernels as
// in training, or of this one without clusters, which takes the streaming kernels for large
// samples. Inputs rotate, so that they are not in the L2 cache. Needs a GPU of compute
// capability 9.0 with 10 GiB of free memory.
//
//   tools/gpu/harness/gnback/build.sh FOLDER [BASELINE_CHECKOUT]
//   cd FOLDER && OUT_DIR=. ./bench      or run.sh, which also limits its time
//
// The line `check:` has the number of bad checks. Then there is a line per shape:
// - number of calls in a step, image size, channels, and the flags of Shape (common.cuh);
// - microseconds of the baseline, the default tiling (with its name), the fastest tiling, and the
//   floor: every array moved once at 4.2 TB/s;
// - the fastest tilings of the sweep, as channels of a block/blocks of a cluster/rows, with K if dz
//   stays in shared memory.
// SUM lines add up the calls of a step, by image size (8^2 includes 4^2) and in total.
// $OUT_DIR/sweep.csv gets all tilings: batch, side, channels, active, added, tiling, microseconds.
// Calls with dropout are those with neither.
//
// The exit status is 1 if a check is bad or a CUDA call failed. No shape begins after 20 s; after
// 30 s SIGALRM ends the program.
#include "check.cuh"

// The tilings to try, without those that are sure to be slow: rows of too few or too many bytes,
// too few blocks, or too few pixels for the blocks of a cluster.
static std::vector<BackwardTiling> candidates(const NormGradient& p, int vector) {
  std::vector<BackwardTiling> found;
  const int e = (int)bytes_of(p.type);
  const long C = p.x.total, group = C / p.groups, unit = std::lcm<long>(group, vector);
  for (long own = unit; own <= C; own += unit) {
    if (C % own || (own * e > 256 && own > unit) || (own * e < 48 && own * 2 <= C)) continue;
    for (int ranks : {1, 2, 4, 8}) {
      if (ranks > 1 && p.pixels / ranks < (ranks > 4 ? 512 : 128)) continue;
      if (p.batch * (C / own) * ranks < 100) continue;
      for (int rows : {8, 16, 32, 64, 128}) {
        const long threads = rows * own / vector;
        if (threads > kBackwardThreads || threads < 32 || p.pixels < rows * ranks) continue;
        const BackwardTiling t = tiling_of(p, vector, {own, ranks, rows});
        if (!fits(t) || t.chunks > kBackwardStages || t.chunk_steps * t.chunks > 16) continue;
        found.push_back(t);
      }
    }
  }
  return found;
}
int main() {
  alarm(30);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const double t0 = now();
  const unsigned seed = (unsigned)time(nullptr);
  CHECK(cudaStreamCreate(&st));
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  printf("%s sms %d seed %u\n", prop.name, prop.multiProcessorCount, seed);
  const int wrong = check_all(seed);
  printf("t=%.1f s\n", now() - t0);
  std::vector<Shape> base = {
#include "shapes.inc"
  };
  const char* dir = getenv("OUT_DIR");
  FILE* csv = fopen((std::string(dir ? dir : ".") + "/sweep.csv").c_str(), "w");
  char *inp, *outp;
  const size_t IN = 6ull << 30, OUT = 4ull << 30;
  CHECK(cudaMalloc(&inp, IN));
  CHECK(cudaMalloc(&outp, OUT));
  fill_host<__nv_bfloat16>(inp, IN / 2, seed, 0.1f, 1.0f);
  float* rows;
  CHECK(cudaMalloc(&rows, 4 << 20));
  fill_host<float>(rows, 1 << 20, 5, 1, 0.1f);
  CHECK(cudaStreamSynchronize(st));
  for (int batch : {256, 32, 0}) {  // 0: the shapes of batch 128, as they are
    double sums[4][4] = {};         // [old, default, best, floor][image size]
    auto level = [](int side) { return side == 64 ? 0 : side == 32 ? 1 : side == 16 ? 2 : 3; };
    printf(
        "batch %d: count shape silu/act/added/samples/drops | old | default | best | floor us | "
        "tilings: channels/cluster/rows\n",
        batch ? batch : 128);
    for (Shape s : base) {
      if ((batch == 0) != (s.batch == 128)) continue;
      if (batch) s.batch = batch;
      if (now() - t0 > 20) {
        printf("out of time\n");
        break;
      }
      long C = 0;
      for (int c : s.parts) C += c;
      const double unit_bytes = (double)s.batch * s.side * s.side * C * 2;
      const double floor_us = unit_bytes * (3 + s.active + s.added) / 4.2e6;
      const int sets = (int)std::min(
          40.0, std::max(2.0, std::ceil(300e6 / (unit_bytes * (3 + s.active + s.added)))));
      std::vector<NormGradient> plans;
      Memory in{inp, IN, 0}, out{outp, OUT, 0};
      for (int k = 0; k < sets; ++k)
        plans.push_back(make_plan(s, Type::kBfloat16, in, out, false, rows));
      const int vector = vector_for(plans[0].x, Type::kBfloat16);
      const int nodes = (int)std::min(24.0, std::max(3.0, 900 / (2 * floor_us + 2)));
      auto old_run = [&](int k) { return old_gradient(plans[k], st); };
      std::vector<std::pair<double, BackwardTiling>> found;
      auto time_new = [&](const BackwardTiling& t, int reps) {
        return time_us([&](int k) { return run_new(plans[k], t, vector); }, sets, nodes, reps);
      };
      auto add = [&](const BackwardTiling& t) {
        CHECK(run_new(plans[0], t, vector));
        CHECK(cudaStreamSynchronize(st));
        const double us = time_new(t, 2);
        found.push_back({us, t});
        if (csv)
          fprintf(csv, "%d,%d,%ld,%d,%d,%s,%.2f\n", s.batch, s.side, C, s.active, s.added,
                  name_of(t, vector).c_str(), us);
      };
      for (const BackwardTiling& t : candidates(plans[0], vector)) add(t);
      auto by = [](const auto& a, const auto& b) { return a.first < b.first; };
      std::sort(found.begin(), found.end(), by);
      if (found.empty()) {
        printf("no candidate\n");
        continue;
      }
      std::vector<double> times[3];  // old, default, best
      const BackwardTiling best = found[0].second;
      const BackwardTiling usual = backward_tiling({132, 232448, 8}, s.batch, plans[0].pixels, C,
                                                   C / s.groups, vector, 2, s.added);
      for (int r = 0; r < 3; ++r) {
        times[0].push_back(time_us(old_run, sets, nodes, 3));
        times[1].push_back(time_new(usual, 3));
        times[2].push_back(time_new(best, 3));
      }
      for (int k = 0; k < 3; ++k) {
        std::sort(times[k].begin(), times[k].end());
        sums[k][level(s.side)] += s.count * times[k][1];
      }
      sums[3][level(s.side)] += s.count * floor_us;
      printf("%dx %d^2 %ld %d%d%d%d%d |%6.1f |%6.1f %s |%6.1f |%6.1f |", s.count, s.side, C, s.silu,
             s.active, s.added, s.samples, s.drops, times[0][1], times[1][1],
             name_of(usual, vector).c_str(), times[2][1], floor_us);
      for (int i = 0; i < std::min<int>(12, (int)found.size()); ++i)
        printf(" %s=%.1f", name_of(found[i].second, vector).c_str(), found[i].first);
      printf("\n");
    }
    printf("SUM batch %d old/default/best/floor us:", batch ? batch : 128);
    double all[4] = {};
    for (int l = 0; l < 4; ++l) {
      printf(" %d^2", 64 >> l);
      for (int k = 0; k < 4; ++k) {
        printf("%c%.0f", k ? '/' : ' ', sums[k][l]);
        all[k] += sums[k][l];
      }
    }
    printf(" ALL %.0f/%.0f/%.0f/%.0f  t=%.1f s\n", all[0], all[1], all[2], all[3], now() - t0);
  }
  if (csv) fclose(csv);
  CHECK(cudaDeviceSynchronize());
  return wrong != 0;
}
