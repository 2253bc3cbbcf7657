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
#include "calls.cuh"

namespace {

constexpr int kCalls = 64, kWarmup = 10, kRounds = 30;  // per graph; launches of the graph

void* zeros(size_t bytes) {
  void* array;
  CHECK(cudaMalloc(&array, bytes));
  CHECK(cudaMemset(array, 0, bytes));
  return array;
}

}  // namespace

int main(int count, char** arguments) {
  int multiprocessors;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  for (int batch : batches_of(count, arguments, {32, 256})) {
    const size_t image_bytes = 2 * image_numbers(batch), shift_bytes = 4 * kShifts * size_t(batch);
    void *x = zeros(image_bytes), *y = zeros(image_bytes), *shift = zeros(shift_bytes),
         *kernel = zeros(2 * kernel_numbers());
    for (const Case& c : kCases) {
      for (bool flipped : {false, true}) {
        const Call call{batch, c, flipped, multiprocessors, x, kernel, static_cast<float*>(shift)};
        const auto run = [&](int) { return call.run(y, stream); };
        CHECK(run(0));  // loads the kernel
        const auto us = graph_times(stream, kCalls, kWarmup, kRounds, run);
        const double flops = 18.0 * batch * c.size * c.size * c.channels * c.features;
        const float median = us[us.size() / 2];
        std::printf("%s %8.3f us [%.3f %.3f] %4.0f TFLOP/s\n", call.name().c_str(), median,
                    us.front(), us.back(), flops / median * 1e-6);
        std::fflush(stdout);
      }
    }
    for (void* array : {x, y, shift, kernel}) CHECK(cudaFree(array));
  }
}
