// Times the Hopper kernel of convolutions (conv3x3/hopper/forward.cuh), forward and input gradient,
// in bfloat16, for shapes of configs/elephants64.py. Needs a GPU of compute capability 9.0.
//
//   tools/gpu/harness/conv/build.sh FOLDER
//   FOLDER/bench [BATCH ...]     default: 32 256
//
// To compare two versions, build each in a folder of its own and run both programs in turns. A line
// per call: batch, image size, channels and features, direction, the median microseconds per call
// with [fastest slowest], and TFLOP/s. A time is that of a CUDA graph of 64 calls, divided by 64,
// so it includes the gap between two kernels. Images and kernels are zeros, which take less power,
// so the clock is higher than in a training step. Results are not checked: pytest does that
// (xla_ffi/conv3x3/parity_test.py). The exit status is 1 if a CUDA call failed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../graph_times.cuh"
#include "conv3x3/kernels.h"

using namespace jaxunet;
using namespace jaxunet::cuda;

namespace {

struct Case {
  int size, channels, features;
};
constexpr Case kCases[] = {{64, 64, 64},   {64, 128, 64},  {32, 64, 128},  {32, 128, 128},
                           {32, 320, 128}, {16, 128, 192}, {16, 192, 192}, {16, 448, 192},
                           {8, 192, 256},  {8, 256, 256},  {8, 512, 256}};
constexpr int kCalls = 64, kWarmup = 10, kRounds = 30;  // per graph; launches of the graph

// Arrays for the largest case, of zeros.
struct Arrays {
  void *x, *kernel, *y;
  float* shift;

  explicit Arrays(int batch) {
    size_t image_bytes = 0, kernel_bytes = 0;
    for (const Case& c : kCases) {
      const size_t pixels = size_t(batch) * c.size * c.size;
      image_bytes = std::max(image_bytes, 2 * pixels * std::max(c.channels, c.features));
      kernel_bytes = std::max(kernel_bytes, size_t{18} * c.channels * c.features);
    }
    shift = static_cast<float*>(zeros(4 * 1024 * size_t(batch)));
    x = zeros(image_bytes);
    y = zeros(image_bytes);
    kernel = zeros(kernel_bytes);
  }
  Arrays(const Arrays&) = delete;
  ~Arrays() {
    for (void* array : {x, kernel, y, static_cast<void*>(shift)}) cuda_ok(cudaFree(array));
  }

 private:
  static void* zeros(size_t bytes) {
    void* array;
    cuda_ok(cudaMalloc(&array, bytes));
    cuda_ok(cudaMemset(array, 0, bytes));
    return array;
  }
};

Conv3x3 plan_of(const Arrays& arrays, int batch, const Case& c, bool flipped) {
  const int in = flipped ? c.features : c.channels, out = flipped ? c.channels : c.features;
  Conv3x3 plan{};
  plan.type = Type::kBfloat16;
  plan.batch = batch;
  plan.height = plan.width = c.size;
  plan.features = out;
  plan.x = {1, {arrays.x}, {in}, in};
  plan.kernel = arrays.kernel;
  plan.flipped = flipped;
  plan.shift = {arrays.shift, out};
  plan.y = {1, {arrays.y}, {out}, out};
  return plan;
}

std::vector<float> times(const Conv3x3& plan, int multiprocessors, cudaStream_t stream) {
  const auto call = [&](int) { return hopper_forward(plan, multiprocessors, stream); };
  cuda_ok(call(0));  // loads the kernel
  return graph_times(stream, kCalls, kWarmup, kRounds, call);
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<int> batches;
  for (int i = 1; i < count; ++i) batches.push_back(std::atoi(arguments[i]));
  if (batches.empty()) batches = {32, 256};
  int multiprocessors;
  cudaStream_t stream;
  cuda_ok(cudaStreamCreate(&stream));
  cuda_ok(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  for (int batch : batches) {
    if (batch < 1) {
      std::printf("error: a batch: expected a whole number of 1 or more\n");
      return 1;
    }
    const Arrays arrays(batch);
    for (const Case& c : kCases) {
      for (bool flipped : {false, true}) {
        const auto us = times(plan_of(arrays, batch, c, flipped), multiprocessors, stream);
        const double flops = 18.0 * batch * c.size * c.size * c.channels * c.features;
        const float median = us[us.size() / 2];
        std::printf("B%-3d %2dx%-2d %3d to %-3d %-14s %8.3f us [%.3f %.3f] %4.0f TFLOP/s\n", batch,
                    c.size, c.size, c.channels, c.features, flipped ? "input gradient" : "forward",
                    median, us.front(), us.back(), flops / median * 1e-6);
        std::fflush(stdout);
      }
    }
  }
}
