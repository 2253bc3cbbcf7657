// Times the Hopper kernel of convolutions while another kernel holds multiprocessors, as an
// all-reduce of NCCL does: launches whose blocks draw their tiles (draws_tiles in
// conv3x3/hopper/tile.h) against the fixed schedule. Needs a GPU of compute capability 9.0.
//
//   tools/gpu/harness/conv/build.sh FOLDER
//   FOLDER/held [BATCH ...]     default: 32 128
//
// Every block of the kernel that holds has most of the shared memory of a multiprocessor. For each
// call, a line per number of held multiprocessors: batch, image size, channels to features,
// direction, held, the microseconds per call with the fixed schedule, and of the chosen one, or
// "fixed" if it is the same; medians of CUDA graphs that are launched in turns. At the end, for
// each batch and number, the sums over all calls, and over those of 64×64 pixels, and their ratio.
// Before the times, the chosen schedule must give the bits of the fixed one, with and without held
// multiprocessors, in several streams and in a graph whose branches run at once; if not, or if a
// CUDA call failed, the exit status is 1.
#include <cuda_bf16.h>

#include <chrono>
#include <map>
#include <thread>

#include "calls.cuh"
#include "conv3x3/hopper/forward.h"

using namespace jaxunet;
using namespace jaxunet::cuda;

namespace {

enum Schedules { kFixed, kChosen, kSchedules };
constexpr const char* kNames[] = {"fixed", "chosen"};
Schedules schedule = kChosen;  // of the calls that follow
bool drawn = false;            // whether the last call draws its tiles

}  // namespace

// build.sh lets the linker replace calls of `distribute` (conv3x3/hopper/forward.h) by the second
// of these, so that the library needs no switch.
extern "C" int __real__ZN7jaxunet4cuda7forward10distributeEPKviPNS1_10ParametersE(
    const void* y, int multiprocessors, forward::Parameters* p);
extern "C" int __wrap__ZN7jaxunet4cuda7forward10distributeEPKviPNS1_10ParametersE(
    const void* y, int multiprocessors, forward::Parameters* p) {
  const int blocks =
      __real__ZN7jaxunet4cuda7forward10distributeEPKviPNS1_10ParametersE(y, multiprocessors, p);
  if (schedule == kFixed) p->counter = -1;
  drawn = p->counter >= 0;
  return blocks;
}

namespace {

constexpr int kHeld[] = {0, 8, 16, 24};
constexpr int kCalls = 16, kRounds = 11;  // per graph; launches of each graph
constexpr int kArrays = 4;                // results of calls that run at once

bool failed = false;
void fail(const std::string& what) {
  std::printf("FAIL %s\n", what.c_str());
  failed = true;
}

// Values from -1 to 1 that depend on the index and the seed.
__global__ void fill(__nv_bfloat16* to, int64_t count, unsigned seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed * 40503u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    to[i] = __float2bfloat16(static_cast<float>(x >> 8) / 8388608.0f - 1.0f);
  }
}

// Counts words that differ, and in the second array words that no kernel wrote.
__global__ void compare(const unsigned* a, const unsigned* b, int64_t count, unsigned* differing) {
  unsigned found = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    found += a[i] != b[i] || b[i] == ~0u;
  if (found) atomicAdd(differing, found);
}

// One block holds a multiprocessor until the host stops it, or for some ten seconds. It reads a
// flag on the device: reads of host memory would slow down the kernels beside it.
__global__ void hold(volatile int* running, const volatile int* stop) {
  if (threadIdx.x > 0) return;
  running[blockIdx.x] = 1;
  __threadfence_system();
  const long long begin = clock64();
  while (!*stop && clock64() - begin < 20'000'000'000) __nanosleep(5000);
}

// Holds multiprocessors between `start` and `stop`, beside the calls of a stream.
class Holder {
 public:
  static constexpr int kBytes = 200 * 1024, kMost = 64;

  explicit Holder(cudaStream_t calls) : calls_(calls) {
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK(cudaHostAlloc(&running_, kMost * sizeof(int), cudaHostAllocMapped));
    CHECK(cudaMalloc(&stop_, sizeof(int)));
    CHECK(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    start(1);  // loads the kernel
    stop();
  }
  void start(int count) {
    for (int i = 0; i < kMost; ++i) running_[i] = 0;
    if (count == 0) return;
    int* device;
    CHECK(cudaHostGetDevicePointer(&device, running_, 0));
    CHECK(cudaMemsetAsync(stop_, 0, sizeof(int), stream_));
    hold<<<count, 128, kBytes, stream_>>>(device, stop_);
    CHECK(cudaGetLastError());
    const auto begin = std::chrono::steady_clock::now();
    const auto all = [&] {
      return std::all_of(running_, running_ + count, [](volatile int& one) { return one != 0; });
    };
    while (!all()) {
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(5)) {
        fail("the holder did not start");
        break;
      }
      std::this_thread::yield();
    }
  }
  void stop() {
    CHECK(cudaMemsetAsync(stop_, 1, sizeof(int), calls_));
    CHECK(cudaStreamSynchronize(calls_));
    CHECK(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t calls_, stream_;
  int *running_, *stop_;
};

struct Arrays {
  __nv_bfloat16 *x, *kernel, *y[kArrays], *expected;
  float* shift;
  unsigned* differing;

  explicit Arrays(int batch) {
    const int64_t image = image_numbers(batch), shifts = kShifts * int64_t{batch};
    const auto make = [](int64_t count, unsigned seed) {
      __nv_bfloat16* array;
      CHECK(cudaMalloc(&array, 2 * count));
      fill<<<1024, 256>>>(array, count, seed);
      return array;
    };
    x = make(image, 1);
    kernel = make(kernel_numbers(), 2);
    for (auto& array : y) array = make(image, 3);
    expected = make(image, 4);
    CHECK(cudaMalloc(&shift, 4 * shifts));
    CHECK(cudaMemset(shift, 0, 4 * shifts));
    CHECK(cudaMalloc(&differing, sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());
  }
  Arrays(const Arrays&) = delete;
  ~Arrays() {
    for (void* array :
         {static_cast<void*>(x), static_cast<void*>(kernel), static_cast<void*>(expected),
          static_cast<void*>(shift), static_cast<void*>(differing)})
      CHECK(cudaFree(array));
    for (auto* array : y) CHECK(cudaFree(array));
  }
};

// Compares results with the expected ones and poisons them.
void check(const Call& call, const Arrays& arrays, void* y, const std::string& what,
           cudaStream_t stream) {
  unsigned differing = 0;
  CHECK(cudaMemsetAsync(arrays.differing, 0, sizeof differing, stream));
  compare<<<512, 256, 0, stream>>>(reinterpret_cast<const unsigned*>(arrays.expected),
                                   static_cast<const unsigned*>(y), call.results() / 2,
                                   arrays.differing);
  CHECK(cudaMemcpyAsync(&differing, arrays.differing, sizeof differing, cudaMemcpyDeviceToHost,
                        stream));
  CHECK(cudaMemsetAsync(y, 0xff, 2 * call.results(), stream));
  CHECK(cudaStreamSynchronize(stream));
  if (differing)
    fail(call.name() + " " + what + ": " + std::to_string(differing) + " words differ");
}

// Both schedules, alone and beside the holder.
void check_schedules(const Call& call, const Arrays& arrays, Holder& holder, cudaStream_t stream) {
  schedule = kFixed;
  CHECK(cudaMemsetAsync(arrays.expected, 0xff, 2 * call.results(), stream));
  CHECK(call.run(arrays.expected, stream));
  for (auto* y : arrays.y) CHECK(cudaMemsetAsync(y, 0xff, 2 * call.results(), stream));
  CHECK(cudaStreamSynchronize(stream));
  for (int held : {0, 24}) {
    for (Schedules one : {kFixed, kChosen}) {
      schedule = one;
      holder.start(held);
      for (int repeated = 0; repeated < 3; ++repeated) {
        CHECK(call.run(arrays.y[0], stream));
        check(call, arrays, arrays.y[0],
              std::string(kNames[one]) + ", held " + std::to_string(held), stream);
      }
      holder.stop();
    }
  }
}

// Calls that run at once: in streams of their own, then as branches of a graph.
void check_at_once(const Call& call, const Arrays& arrays, cudaStream_t stream) {
  cudaStream_t streams[kArrays];
  cudaEvent_t begin, ends[kArrays];
  CHECK(cudaEventCreateWithFlags(&begin, cudaEventDisableTiming));
  for (int i = 0; i < kArrays; ++i) {
    CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&ends[i], cudaEventDisableTiming));
  }
  const auto fork = [&](int calls) {
    CHECK(cudaEventRecord(begin, stream));
    for (int i = 0; i < kArrays; ++i) {
      CHECK(cudaStreamWaitEvent(streams[i], begin, 0));
      for (int n = 0; n < calls; ++n) CHECK(call.run(arrays.y[i], streams[i]));
      CHECK(cudaEventRecord(ends[i], streams[i]));
      CHECK(cudaStreamWaitEvent(stream, ends[i], 0));
    }
  };
  fork(20);
  for (auto* y : arrays.y) check(call, arrays, y, "in four streams", stream);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  fork(2);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 20; ++i) CHECK(cudaGraphLaunch(executable, stream));
  for (auto* y : arrays.y) check(call, arrays, y, "in a graph", stream);
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  for (int i = 0; i < kArrays; ++i) {
    CHECK(cudaStreamDestroy(streams[i]));
    CHECK(cudaEventDestroy(ends[i]));
  }
  CHECK(cudaEventDestroy(begin));
}

// The microseconds per call of each schedule while `held` multiprocessors are held.
std::vector<float> times(const std::vector<cudaGraphExec_t>& graphs, Holder& holder, int held,
                         cudaStream_t stream) {
  holder.start(held);
  const auto all = times_in_turns(stream, graphs, kCalls, 2, kRounds);
  holder.stop();
  std::vector<float> medians;
  for (const auto& own : all) medians.push_back(own[own.size() / 2]);
  return medians;
}

using Sums = std::map<std::string, std::vector<double>>;

void time_schedules(const Call& call, const Arrays& arrays, Holder& holder, cudaStream_t stream,
                    Sums& sums) {
  std::vector<cudaGraphExec_t> graphs(kSchedules);
  for (Schedules one : {kFixed, kChosen}) {
    schedule = one;
    graphs[one] = graph_of(stream, kCalls, [&](int) { return call.run(arrays.y[0], stream); });
    CHECK(cudaGraphLaunch(graphs[one], stream));
  }
  CHECK(cudaStreamSynchronize(stream));
  if (!drawn) {
    CHECK(cudaGraphExecDestroy(graphs[kChosen]));
    graphs.resize(1);
  }
  for (int held : kHeld) {
    auto us = times(graphs, holder, held, stream);
    std::printf("%s held %2d %8.2f", call.name().c_str(), held, us[kFixed]);
    if (drawn) {
      std::printf(" %8.2f\n", us[kChosen]);
    } else {
      std::printf("    fixed\n");
      us.push_back(us[kFixed]);
    }
    char name[80];
    for (const char* sizes : {"all sizes", "64x64    "}) {
      if (sizes[0] == '6' && call.shape.size != 64) continue;
      std::snprintf(name, sizeof name, "B%-3d %s held %2d", call.batch, sizes, held);
      auto& sum = sums[name];
      sum.resize(kSchedules);
      for (size_t i = 0; i < us.size(); ++i) sum[i] += us[i];
    }
  }
  std::fflush(stdout);
  for (auto graph : graphs) CHECK(cudaGraphExecDestroy(graph));
}

}  // namespace

int main(int count, char** arguments) {
  int multiprocessors;
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  Holder holder(stream);
  Sums sums;
  for (int batch : batches_of(count, arguments, {32, 128})) {
    const Arrays arrays(batch);
    std::printf("microseconds: fixed, chosen\n");
    for (const Case& shape : kCases) {
      for (bool flipped : {false, true}) {
        const Call call{batch,    shape,         flipped,     multiprocessors,
                        arrays.x, arrays.kernel, arrays.shift};
        check_schedules(call, arrays, holder, stream);
        check_at_once(call, arrays, stream);
        time_schedules(call, arrays, holder, stream, sums);
      }
    }
  }
  std::printf("sums in microseconds: fixed, chosen, their ratio\n");
  for (const auto& [name, sum] : sums) {
    std::printf("%s %9.1f %9.1f %.4f\n", name.c_str(), sum[kFixed], sum[kChosen],
                sum[kChosen] / sum[kFixed]);
  }
  std::printf(failed ? "results differ\n" : "both schedules give the same bits\n");
  return failed;
}
