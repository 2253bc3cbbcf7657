// Checks the multistage kernels of the convolution (check.cuh), and times them and the implicit
// GEMM on convolutions of a training step of elephants64 (shapes.h), in bfloat16; see README.md.
//
//   tools/gpu/harness/portable_conv/build.sh FOLDER
//   FOLDER/bench [check | 32 | 256]     only the checks, or the times of one batch; default: all
//
// The checks print a line for each failure and a summary. The timings have a line per call, and
// lines with the sums of a step:
//   kind, calls, shape, GFLOP | implicit GEMM | chosen tile: time, TFLOP/s, name | all tiles
// A tile is named index:MxN, as in MULTISTAGE_TILES, with /splits for a weight gradient. The times
// of weight gradients include split_k_reduce.
//
// The exit status is 1 if a check or a CUDA call failed; after failed checks nothing is timed.
#include <cstdlib>

#include "../graph_times.cuh"
#include "check.cuh"
#include "shapes.h"

namespace {

// The number of splits of the implicit GEMM, chosen as in conv3x3/weight_gradient.cc.
int gemm_splits(const Conv3x3WeightGradient& plan, int64_t most) {
  const int64_t tiles = (9 * plan.x.total + plan.projected.total + 63) / 64 *
                        ((plan.features + 63) / 64),
                pixels = plan.batch * plan.height * plan.width;
  const int64_t splits = std::min(4 * multiprocessors / tiles, (pixels + 255) / 256);
  return static_cast<int>(std::max<int64_t>(1, std::min(splits, most)));
}

// Adds the partial results of the kernel and of the shortcut.
cudaError_t reduce(const Conv3x3WeightGradient& plan, int splits) {
  const int64_t kernel = 9 * plan.x.total * plan.features,
                shortcut = plan.projected.total * plan.features;
  return jaxunet::cuda::split_k_reduce(
      {{},
       {},
       {},
       {shortcut_partials(plan, splits), plan.dshortcut, splits, shortcut},
       {plan.workspace, plan.dkernel, splits, kernel}},
      stream);
}

// The microseconds of a call: the median of several launches of a graph of several calls.
template <class Run>
double microseconds(Run run) {
  constexpr int kCalls = 6, kGraphs = 3;
  CHECK(run());  // the first call of a kernel loads its code
  return graph_times(stream, kCalls, 1, kGraphs, [&](int) { return run(); })[kGraphs / 2];
}

// Microseconds of the implicit GEMM, the chosen tile and the fastest tile.
struct Times {
  double flops = 0, gemm = 0, chosen = 0, best = 0;
  void add(const Times& more, int count) {
    flops += count * more.flops;
    gemm += count * more.gemm;
    chosen += count * more.chosen;
    best += count * more.best;
  }
};

std::string name_of(int tile, int splits) {
  const auto& t = jaxunet::cuda::kMultistageTiles[tile];
  std::string name = std::to_string(tile) + ":" + std::to_string(t.m) + "x" + std::to_string(t.n);
  return splits ? name + "/" + std::to_string(splits) : name;
}

// Prints the line of a call. `all`: times and names of the tiles.
void print(const Call& call, const Times& t, const std::string& chosen,
           std::vector<std::pair<double, std::string>> all) {
  std::sort(all.begin(), all.end());
  printf("%-8s %2d x %-28s %6.1f GF | %7.1f us | %7.1f us %4.0f TF %-12s |", kKindNames[call.kind],
         call.count, call.name.c_str(), t.flops / 1e9, t.gemm, t.chosen, t.flops / t.chosen / 1e6,
         chosen.c_str());
  for (const auto& [us, name] : all) printf(" %s %.1f", name.c_str(), us);
  printf("\n");
}

Times time_forward(const Call& call, Pool& pool) {
  const Conv3x3 plan = forward_plan(call.shape, Type::kBfloat16, pool);
  Times t;
  t.flops = flops_of(call.shape);
  t.gemm = microseconds([&] { return jaxunet::cuda::implicit_gemm_forward(plan, stream); });
  const int chosen = jaxunet::cuda::multistage_tile(plan, multiprocessors);
  std::vector<std::pair<double, std::string>> all;
  for (int tile = 0; tile < kMultistageTileCount; ++tile) {
    const double us =
        microseconds([&] { return jaxunet::cuda::multistage_forward(plan, tile, stream); });
    all.push_back({us, name_of(tile, 0)});
    if (tile == chosen) t.chosen = us;
  }
  t.best = std::min_element(all.begin(), all.end())->first;
  print(call, t, name_of(chosen, 0), all);
  return t;
}

Times time_weight_gradient(const Call& call, Pool& pool) {
  constexpr int64_t kFloatsEach = 9 * 64 * 64;  // PARTIAL_SUMS in conv3x3/parameter_gradients.py
  const int64_t weights = weights_of(call.shape),
                most = std::max<int64_t>(1, kFloatsEach * multiprocessors / weights);
  auto plan = weight_gradient_plan(call.shape, Type::kBfloat16, static_cast<int>(most), pool);
  plan.dkernel = {pool(weights, Kind::kFloatOutput), Type::kFloat32};
  plan.dshortcut = {pool(weights, Kind::kFloatOutput), Type::kFloat32};
  Times t;
  t.flops = flops_of(call.shape);
  const int before = gemm_splits(plan, most);
  t.gemm = microseconds([&] {
    const cudaError_t error = jaxunet::cuda::implicit_gemm_weight_gradient(
        plan, before, plan.workspace, shortcut_partials(plan, before), stream);
    return error == cudaSuccess ? reduce(plan, before) : error;
  });
  const auto chosen = jaxunet::cuda::multistage_choice(plan, multiprocessors, most);
  std::vector<std::pair<double, std::string>> all;
  for (int tile = 0; tile < kMultistageTileCount; ++tile) {
    const auto usual = jaxunet::cuda::multistage_splits(plan, tile, multiprocessors, most).splits;
    std::vector<int64_t> tried = {usual, std::max<int64_t>(usual / 2, 1),
                                  std::min(2 * usual, most)};
    std::sort(tried.begin(), tried.end());
    tried.erase(std::unique(tried.begin(), tried.end()), tried.end());
    for (const int64_t count : tried) {
      const int splits = static_cast<int>(count);
      const double us = microseconds([&] {
        const cudaError_t error = jaxunet::cuda::multistage_weight_gradient(
            plan, tile, splits, plan.workspace, shortcut_partials(plan, splits), stream);
        return error == cudaSuccess ? reduce(plan, splits) : error;
      });
      all.push_back({us, name_of(tile, splits)});
      if (tile == chosen.tile && count == chosen.splits) t.chosen = us;
    }
  }
  t.best = std::min_element(all.begin(), all.end())->first;
  print(call, t, name_of(chosen.tile, static_cast<int>(chosen.splits)), all);
  return t;
}

void time_batch(int batch) {
  printf("batch %d: kind, calls a step, shape, GFLOP | gemm | chosen tile[/splits] | fastest\n",
         batch);
  Pool pool;
  std::vector<Times> sums(kKinds);
  for (const Call& call : calls_of_step(batch)) {
    pool.clear();
    const Times t =
        call.kind == kWeights ? time_weight_gradient(call, pool) : time_forward(call, pool);
    sums[call.kind].add(t, call.count);
  }
  Times step;
  for (const Times& sum : sums) step.add(sum, 1);
  sums.push_back(step);
  printf("batch %d, a step | GFLOP | gemm ms | chosen ms, TFLOP/s | fastest ms, TFLOP/s\n", batch);
  for (int kind = 0; kind <= kKinds; ++kind) {
    const Times& t = sums[kind];
    printf("  %-8s | %6.0f | %7.3f | %7.3f %4.0f | %7.3f %4.0f\n",
           kind < kKinds ? kKindNames[kind] : "all", t.flops / 1e9, t.gemm / 1e3, t.chosen / 1e3,
           t.flops / t.chosen / 1e6, t.best / 1e3, t.flops / t.best / 1e6);
  }
}

}  // namespace

int main(int count, char** arguments) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string only = count > 1 ? arguments[1] : "";
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  multiprocessors = device.multiProcessorCount;
  CHECK(cudaStreamCreate(&stream));
  printf("%s, %d multiprocessors\n", device.name, multiprocessors);
  if ((only.empty() || only == "check") && check_all() > 0) return 1;
  if (only == "check") return 0;
  for (const int batch : {32, 256}) {
    if (only.empty() || std::atoi(only.c_str()) == batch) time_batch(batch);
  }
  return 0;
}
