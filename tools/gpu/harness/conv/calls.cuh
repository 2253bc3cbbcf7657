// The calls of bench.cu and held.cu: the convolutions of configs/elephants64.py, forward and input
// gradient, in bfloat16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../graph_times.cuh"
#include "conv3x3/kernels.h"

struct Case {
  int size, channels, features;
};
constexpr Case kCases[] = {{64, 64, 64},   {64, 128, 64},  {32, 64, 128},  {32, 128, 128},
                           {32, 320, 128}, {16, 128, 192}, {16, 192, 192}, {16, 448, 192},
                           {8, 192, 256},  {8, 256, 256},  {8, 512, 256}};

// Numbers of the largest images and of the largest kernel.
inline int64_t image_numbers(int batch) {
  int64_t most = 0;
  for (const Case& c : kCases)
    most = std::max(most, int64_t{batch} * c.size * c.size * std::max(c.channels, c.features));
  return most;
}
inline int64_t kernel_numbers() {
  int64_t most = 0;
  for (const Case& c : kCases) most = std::max(most, int64_t{9} * c.channels * c.features);
  return most;
}
constexpr int kShifts = 1024;  // at least the features of any case

struct Call {
  int batch;
  Case shape;
  bool flipped;  // the input gradient
  int multiprocessors;
  void *x, *kernel;
  const float* shift;

  int64_t results() const {
    return int64_t{batch} * shape.size * shape.size * (flipped ? shape.channels : shape.features);
  }
  std::string name() const {
    char text[80];
    std::snprintf(text, sizeof text, "B%-3d %2dx%-2d %3d to %-3d %-14s", batch, shape.size,
                  shape.size, shape.channels, shape.features,
                  flipped ? "input gradient" : "forward");
    return text;
  }
  cudaError_t run(void* y, cudaStream_t stream) const {
    const int in = flipped ? shape.features : shape.channels,
              out = flipped ? shape.channels : shape.features;
    jaxunet::Conv3x3 plan{};
    plan.type = jaxunet::Type::kBfloat16;
    plan.batch = batch;
    plan.height = plan.width = shape.size;
    plan.features = out;
    plan.x = {1, {x}, {in}, in};
    plan.kernel = kernel;
    plan.flipped = flipped;
    plan.shift = {shift, out};
    plan.y = {1, {y}, {out}, out};
    return jaxunet::cuda::hopper_forward(plan, multiprocessors, stream);
  }
};

// Returns the batches of the command line; ends the program if one is not a number of 1 or more.
inline std::vector<int> batches_of(int count, char** arguments, std::vector<int> usual) {
  std::vector<int> batches;
  for (int i = 1; i < count; ++i) batches.push_back(std::atoi(arguments[i]));
  for (int batch : batches) {
    if (batch >= 1) continue;
    std::printf("error: a batch: expected a whole number of 1 or more\n");
    std::exit(1);
  }
  return batches.empty() ? usual : batches;
}
