// Is a forward convolution of e4m3 at least 1.5 times as fast as that of bfloat16, and as exact as
// its rounded operands allow? Checks and times the variants of kernel.cuh (variants.h) beside the
// Hopper kernel of conv3x3/hopper/forward.cuh, for 256 images of 32×32 with 128 channels. Needs a
// GPU of compute capability 9.0.
//
//   tools/gpu/harness/fp8/build.sh FOLDER
//   timeout 300 FOLDER/bench [--check] [--only N[,N]...] [BATCH [SIZE]]
//
// --check: without times. --only: these variants, counted from 0; 0 and 1 use no wgmma. SIZE: rows
// and columns of an image, at most 64.
//
// 1. Plain kernel: its float32 sums against float64 on the CPU, so the layouts of x and the weights
//    are right. 2. For each variant, which input every output reads (checks.cuh), and all outputs
//    against the plain kernel, for small images on two blocks, where strips go beyond the image and
//    all barriers wrap. If a variant fails while "scalar" with as many tiles is right, descriptors
//    or wgmmas are wrong, else strips, barriers or the epilogue. A kernel that does not end within
//    five seconds ends the program with status 2. 3. All outputs of the real size, and errors of
//    400 pixels against float64. 4. Medians of CUDA graphs of 20 calls, launched in turns; then two
//    seconds of calls of bf16 and of the fastest variants, where power limits the clock.
//
// Errors, in % of the RMS of the outputs: the largest and the RMS against float64 of the rounded
// operands; "rounds": the RMS relative to that of exact sums rounded to bf16; "gate": the same if
// both are compared with float64 of the operands before rounding to e4m3.
//
// The table comes last. The exit status is 1 if a value is wrong; a gate that fails is only told.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "checks.cuh"
#include "conv3x3/hopper/forward.h"
#include "conv3x3/kernels.h"
#include "reference.cuh"
#include "variants.h"

namespace jaxunet::cuda::forward {
// The harness calls no other types, so their kernels are not built.
const Launches kLaunchesFloat16{}, kWideLaunches{};
}  // namespace jaxunet::cuda::forward

namespace jaxunet::cuda::fp8 {
namespace {

constexpr int kCalls = 20, kRounds = 31;
constexpr Images kSmall[] = {{3, 20}, {5, 8}};
constexpr int kSmallBlocks = 2;

bool failed = false;

struct Arrays {
  float *x, *bias, *scale, *wanted;
  uint8_t *x8, *w8;
  __nv_bfloat16 *x16, *w16, *y;

  explicit Arrays(int64_t numbers)
      : x(allocate<float>(numbers)),
        bias(allocate<float>(kChannels)),
        scale(allocate<float>(1)),
        wanted(allocate<float>(numbers)),
        x8(allocate<uint8_t>(numbers)),
        w8(allocate<uint8_t>(kWeightBytes)),
        x16(allocate<__nv_bfloat16>(numbers)),
        w16(allocate<__nv_bfloat16>(kWeightBytes)),
        y(allocate<__nv_bfloat16>(numbers)) {}

  void fill(const Images& images, const Weights& weights) const {
    draw_images<<<1024, 256>>>(images.numbers(), x, x8, x16);
    CHECK(cudaGetLastError());
    upload(weights.e4m3, w8);
    upload(weights.bf16, w16);
    upload(weights.bias, bias);
    upload(std::vector<float>{weights.scale}, scale);
    convolve_plainly<<<static_cast<unsigned>((images.pixels() + 7) / 8), kChannels>>>(
        x8, w8, scale, bias, images.size, images.pixels(), wanted);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }
};

template <class V>
cudaError_t run(const Arrays& a, const Images& images, int blocks, cudaStream_t stream) {
  const auto filled = std::make_unique<Parameters>();
  Parameters& p = *filled;
  // 128 channels of one byte are 64 elements of two.
  cudaError_t error =
      image_map(&p.x, Type::kBfloat16, a.x8, {images.batch, images.size, images.size, 64},
                {1, V::kRows + 2, kHaloColumns, 64}, false);
  if (error == cudaSuccess)
    error =
        tensor_map(&p.weights, Type::kBfloat16, a.w8, {64, kChannels, kTaps}, {64, kChannels, 1});
  if (error == cudaSuccess)
    error =
        image_map(&p.y, Type::kBfloat16, a.y, {images.batch, images.size, images.size, kChannels},
                  {1, 8, kColumns, 64}, false);
  if (error == cudaSuccess) error = allow_shared_memory(fp8_forward<V>, V::kSharedBytes);
  if (error != cudaSuccess) return error;
  p.scale = a.scale;
  p.bias = a.bias;
  set_strips(V::kRows, images.batch, images.size, &p);
  return launch(fp8_forward<V>, dim3(std::min(p.strips, blocks)), kThreads, V::kSharedBytes, stream,
                p);
}

cudaError_t run_bf16(const Arrays& a, const Images& images, int blocks, cudaStream_t stream) {
  Conv3x3 plan{};
  plan.type = Type::kBfloat16;
  plan.batch = images.batch;
  plan.height = plan.width = images.size;
  plan.features = kChannels;
  plan.x = {1, {a.x16}, {kChannels}, kChannels};
  plan.kernel = a.w16;
  plan.shift = {a.bias, 0};
  plan.y = {1, {a.y}, {kChannels}, kChannels};
  return hopper_forward(plan, blocks, stream);
}

struct Entry {
  std::string name;
  cudaError_t (*run)(const Arrays&, const Images&, int blocks, cudaStream_t);
  bool scalar = false, wrong = false;
  float us = 0;
  double largest = 0, rms = 0, rounds = 0, gate = 0;
  cudaGraphExec_t graph = nullptr;
};

// Runs an entry once, on an output of NaN. Ends the program if it does not end.
void run_once(const Entry& entry, const Arrays& arrays, const Images& images, int blocks,
              cudaStream_t stream) {
  CHECK(cudaMemset(arrays.y, 0xff, 2 * images.numbers()));
  CHECK(cudaDeviceSynchronize());
  const cudaError_t launched = entry.run(arrays, images, blocks, stream);
  const auto begin = std::chrono::steady_clock::now();
  cudaError_t state = launched == cudaSuccess ? cudaStreamQuery(stream) : launched;
  while (state == cudaErrorNotReady &&
         std::chrono::steady_clock::now() - begin < std::chrono::seconds(5)) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    state = cudaStreamQuery(stream);
  }
  if (state == cudaSuccess) return;
  std::printf("FAIL %s, %d images of %d: %s\n", entry.name.c_str(), images.batch, images.size,
              state == cudaErrorNotReady ? "does not end" : cudaGetErrorString(state));
  std::fflush(stdout);
  std::_Exit(2);
}

// Compares all outputs with those of the plain kernel.
bool matches(const Entry& entry, const Arrays& arrays, const Images& images, int blocks,
             cudaStream_t stream) {
  static auto* const found = allocate<Differences>(1);
  run_once(entry, arrays, images, blocks, stream);
  upload(std::vector<Differences>{{0, ~0ull}}, found);
  constexpr float kMargin = 0.1f;  // for wgmma's sums; the outputs have an RMS of 0.6
  compare<<<1024, 256>>>(arrays.y, arrays.wanted, images.numbers(), kMargin, found);
  CHECK(cudaGetLastError());
  const Differences all = download(found, 1)[0];
  if (all.wrong == 0) return true;
  const Place at = place_of(images, static_cast<int64_t>(all.first));
  std::printf("    %llu of %ld outputs differ from the plain kernel's, first (%d, %d, %d, %d)\n",
              all.wrong, long(images.numbers()), at.sample, at.row, at.column, at.channel);
  return false;
}

void check_small(std::vector<Entry>& entries, const Arrays& arrays, const Weights& weights,
                 cudaStream_t stream) {
  for (Entry& entry : entries) {
    for (const Images& images : kSmall) {
      upload(std::vector<float>{1}, arrays.scale);
      upload(std::vector<float>(kChannels), arrays.bias);
      const bool reads = reads_its_inputs(images, arrays.x8, arrays.w8, arrays.y, [&] {
        run_once(entry, arrays, images, kSmallBlocks, stream);
      });
      arrays.fill(images, weights);
      const bool right = matches(entry, arrays, images, kSmallBlocks, stream) && reads;
      entry.wrong |= !right;
      if (!right)
        std::printf("FAIL %s: %d images of %d\n", entry.name.c_str(), images.batch, images.size);
    }
    std::printf("small images: %-40s %s\n", entry.name.c_str(), entry.wrong ? "WRONG" : "right");
    std::fflush(stdout);
    failed |= entry.wrong;
  }
}

// `own`: the float64 sums of the entry's operands.
void measure_errors(Entry& entry, const Exact& exact, const std::vector<double>& own,
                    const Arrays& arrays) {
  const auto y = exact.take(arrays.y);
  const auto rounded = [&](size_t i) {
    return double{__bfloat162float(__double2bfloat16(exact.rounded[i]))};
  };
  const double rms = exact.rms();
  for (size_t i = 0; i < y.size(); ++i)
    entry.largest = std::max(entry.largest, std::abs(y[i] - own[i]) / rms);
  entry.rms = exact.rms_of([&](size_t i) { return y[i] - own[i]; }) / rms;
  entry.rounds =
      entry.rms * rms / exact.rms_of([&](size_t i) { return rounded(i) - exact.rounded[i]; });
  entry.gate = exact.rms_of([&](size_t i) { return y[i] - exact.before[i]; }) /
               exact.rms_of([&](size_t i) { return rounded(i) - exact.before[i]; });
}

// The float32 sums of the plain kernel against float64.
void check_plain(const Exact& exact, const Arrays& arrays) {
  double largest = 0;
  size_t i = 0;
  for (const int64_t pixel : exact.pixels) {
    for (const float value : download(arrays.wanted + pixel * kChannels, kChannels))
      largest = std::max(largest, std::abs(value - exact.rounded[i++]));
  }
  const bool right = largest < 1e-4 * exact.rms();
  failed |= !right;
  std::printf("plain kernel against float64: largest error %.1e of the RMS %.3f: %s\n",
              largest / exact.rms(), exact.rms(), right ? "right" : "FAIL");
  const double rms = exact.rms();
  std::printf(
      "RMS error in %%: bf16 of exact sums %.4f; e4m3 operands, exact sums %.4f\n",
      100 / rms * exact.rms_of([&](size_t n) {
        return __bfloat162float(__double2bfloat16(exact.rounded[n])) - exact.rounded[n];
      }),
      100 / rms * exact.rms_of([&](size_t n) { return exact.rounded[n] - exact.before[n]; }));
  std::fflush(stdout);
}

void time_entries(std::vector<Entry>& entries, const Arrays& arrays, const Images& images,
                  int blocks, cudaStream_t stream) {
  std::vector<cudaGraphExec_t> graphs;
  for (Entry& entry : entries) {
    const auto call = [&](int) { return entry.run(arrays, images, blocks, stream); };
    graphs.push_back(entry.graph = graph_of(stream, kCalls, call));
  }
  const auto times = times_in_turns(stream, graphs, kCalls, 3, kRounds);
  for (size_t i = 0; i < entries.size(); ++i) entries[i].us = times[i][kRounds / 2];
}

// Two seconds of calls of the fastest entries: of all, and of those that promote every 192.
void time_sustained(const std::vector<Entry>& entries, cudaStream_t stream) {
  const auto fastest = [&](const char* named) {
    const Entry* best = nullptr;
    for (const Entry& entry : entries) {
      if (entry.name.find(named) == std::string::npos || entry.wrong) continue;
      if (!best || entry.us < best->us) best = &entry;
    }
    return best;
  };
  float bf16 = 0;
  for (const Entry* entry : {fastest("bf16"), fastest("tile"), fastest("every 192")}) {
    if (!entry) continue;
    const int launches = static_cast<int>(1e6f / kCalls / entry->us) + 1;  // of one second
    launch_us(stream, entry->graph, launches);
    const float us =
        launch_us(stream, entry->graph, launches) / static_cast<float>(kCalls * launches);
    if (entry->name == "bf16") bf16 = us;
    std::printf("sustained: %-40s %8.2f us, %.2f times bf16's rate\n", entry->name.c_str(), us,
                bf16 / us);
  }
}

void print_table(const std::vector<Entry>& entries, const Images& images) {
  std::printf("\n%-40s %8s %8s %6s %9s %8s %7s %7s\n", "variant", "us", "TFLOP/s", "bf16/x",
              "largest %", "RMS %", "rounds", "gate");
  const double flops = 18.0 * kChannels * static_cast<double>(images.numbers());
  for (const Entry& e : entries) {
    const double ratio = e.us > 0 ? entries[0].us / e.us : 0, rate = e.us > 0 ? flops / e.us : 0;
    std::printf("%-40s %8.2f %8.0f %6.3f %9.4f %8.4f %7.3f %7.4f%s%s\n", e.name.c_str(), e.us,
                rate * 1e-6, ratio, 100 * e.largest, 100 * e.rms, e.rounds, e.gate,
                e.wrong ? " WRONG" : "",
                !e.wrong && ratio >= 1.5 && e.gate <= 1.1
                    ? e.rounds <= 1.1 ? " passes, strictly" : " passes"
                    : "");
  }
}

int bench(int count, char** arguments) {
  bool only_checks = false;
  std::string only;
  std::vector<int> sizes;
  for (int i = 1; i < count; ++i) {
    if (!std::strcmp(arguments[i], "--check")) {
      only_checks = true;
    } else if (!std::strcmp(arguments[i], "--only") && i + 1 < count) {
      only = "," + std::string(arguments[++i]) + ",";
    } else {
      sizes.push_back(std::atoi(arguments[i]));
    }
  }
  const Images images{sizes.size() > 0 ? sizes[0] : 256, sizes.size() > 1 ? sizes[1] : 32};
  if (images.batch < 1 || images.size < 1 || images.size > 64) {
    std::printf("error: expected [BATCH [SIZE]], a batch of 1 or more and a size of 1 to 64\n");
    return 1;
  }
  std::vector<Entry> entries, timed;
  int number = 0;
  each_variant([&](auto variant, const char* name) {
    const bool wanted =
        only.empty() || only.find("," + std::to_string(number) + ",") != std::string::npos;
    ++number;
    if (wanted) entries.push_back({name, run<decltype(variant)>, decltype(variant)::kScalar});
  });
  int multiprocessors;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  int64_t numbers = images.numbers();
  for (const Images& small : kSmall) numbers = std::max(numbers, small.numbers());
  const Arrays arrays(numbers);
  const Weights weights;

  arrays.fill(images, weights);
  const Exact exact(images, arrays.x, arrays.x8, weights);
  check_plain(exact, arrays);
  check_small(entries, arrays, weights, stream);
  arrays.fill(images, weights);
  timed.push_back({"bf16", run_bf16});
  for (const Entry& entry : entries) {
    if (!entry.scalar) timed.push_back(entry);
  }
  for (Entry& entry : timed) {
    const bool bf16 = &entry == &timed[0];
    if (bf16) {
      run_once(entry, arrays, images, multiprocessors, stream);
    } else if (!matches(entry, arrays, images, multiprocessors, stream)) {
      entry.wrong = failed = true;
    }
    measure_errors(entry, exact, bf16 ? exact.before : exact.rounded, arrays);
  }
  if (!only_checks) {
    time_entries(timed, arrays, images, multiprocessors, stream);
    time_sustained(timed, stream);
  }
  print_table(timed, images);
  std::printf("bf16: \"gate\" is its error against float64 relative to that of e4m3\n");
  std::printf(failed ? "FAIL\n" : "all values are right\n");
  return failed;
}

}  // namespace
}  // namespace jaxunet::cuda::fp8

int main(int count, char** arguments) { return jaxunet::cuda::fp8::bench(count, arguments); }
