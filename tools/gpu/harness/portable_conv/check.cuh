// The checks of bench.cu: the multistage kernels with every tile, in both types. Compares results
// with float64 sums, and two runs bit for bit.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "../graph_times.cuh"
#include "cases.h"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/multistage.h"

namespace {

using namespace harness;
using jaxunet::cuda::kMultistageTileCount;

cudaStream_t stream;
int multiprocessors;

// Uniform random numbers in [-1, 1].
template <class T>
__global__ void fill(T* to, int64_t count, uint32_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    uint32_t x = static_cast<uint32_t>(i ^ (i >> 32)) * 0x9e3779b9u + seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    to[i] = static_cast<T>(static_cast<float>(x ^ (x >> 16)) * 0x1p-31f - 1.0f);
  }
}

// Memory for the checks, an allocation per array: random inputs, and outputs that begin as NaN.
template <class T>
struct Arrays {
  std::vector<void*> all;
  uint32_t seed = 1;

  ~Arrays() {
    for (void* data : all) cudaFree(data);
  }
  void* operator()(int64_t count, Kind kind) {
    const bool narrow = kind == Kind::kInput || kind == Kind::kOutput;
    const int64_t bytes = std::max<int64_t>(count, 8) * (narrow ? 2 : 4);
    void* data;
    CHECK(cudaMalloc(&data, bytes));
    all.push_back(data);
    CHECK(cudaMemsetAsync(data, 0xff, bytes, stream));
    seed = seed * 747796405u + 1;
    if (kind == Kind::kInput) fill<<<256, 256, 0, stream>>>(static_cast<T*>(data), count, seed);
    if (kind == Kind::kFloatInput)
      fill<<<256, 256, 0, stream>>>(static_cast<float*>(data), count, seed);
    return data;
  }
};

// Memory for the timings: one allocation of random numbers, from which each call takes inputs and
// outputs anew.
struct Pool {
  static constexpr int64_t kBytes = int64_t{3} << 30;
  char* base;
  int64_t used = 0;

  Pool() {
    CHECK(cudaMalloc(&base, kBytes));
    fill<<<1024, 256, 0, stream>>>(reinterpret_cast<__nv_bfloat16*>(base), kBytes / 2, 5);
  }
  ~Pool() { cudaFree(base); }
  void clear() { used = 0; }
  void* operator()(int64_t count, Kind kind) {
    void* data = base + used;
    used += (count * (kind == Kind::kInput || kind == Kind::kOutput ? 2 : 4) + 255) / 256 * 256;
    if (used > kBytes) {
      printf("FAIL the arrays of a call have more than 3 GiB\n");
      exit(1);
    }
    return data;
  }
};

// The entries that are checked: all, or about kMost of them at equal distances.
struct Sample {
  static constexpr int64_t kMost = 1 << 16;
  int64_t step, count;
  explicit Sample(int64_t entries)
      : step(entries / kMost | 1), count((entries + step - 1) / step) {}
};

template <class T, class Plan>
__global__ void expect(const Plan plan, Sample sample, Exact* to) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < sample.count)
    to[i] = exact<T>(plan, i * sample.step / plan.features, i * sample.step % plan.features);
}

// The result of a kernel for an entry.
template <class T>
__device__ double got(const Conv3x3& plan, int, int64_t row, int64_t feature) {
  return number(static_cast<const T*>(plan.y.data[0]) + row * plan.features + feature);
}
template <class T>
__device__ double got(const Conv3x3WeightGradient& plan, int splits, int64_t row, int64_t feature) {
  return partial_sum(plan, splits, row, feature);
}

struct Outcome {
  unsigned bad;
  float worst;  // largest error / allowed error
};

template <class T, class Plan>
__global__ void compare(const Plan plan, int splits, Sample sample, const Exact* expected,
                        Outcome* outcome) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= sample.count) return;
  const double value =
      got<T>(plan, splits, i * sample.step / plan.features, i * sample.step % plan.features);
  const double error = fabs(value - expected[i].sum),
               bound = allowed<T>(expected[i], std::is_same_v<Plan, Conv3x3>);
  if (!(error <= bound)) atomicAdd(&outcome->bad, 1u);
  if (bound > 0)  // the bits of positive floats, as integers, have the same order
    atomicMax(reinterpret_cast<int*>(&outcome->worst),
              __float_as_int(static_cast<float>(error / bound)));
}

// Runs a kernel twice, each time into NaN; returns true if both runs wrote the same bytes.
template <class Run>
bool repeats(void* output, int64_t bytes, Run run) {
  std::vector<char> results[2];
  for (auto& result : results) {
    result.resize(bytes);
    CHECK(cudaMemsetAsync(output, 0xff, bytes, stream));
    CHECK(run());
    CHECK(cudaMemcpyAsync(result.data(), output, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
  }
  return results[0] == results[1];
}

int checks, failures;
float worst[2];  // largest error / allowed error: forward, weight gradient

// Checks a plan with every tile. The result is `rows` × features.
template <class T, class Plan, class Run>
void check(const Plan& plan, const Case& c, int64_t rows, int splits, void* output, int64_t bytes,
           Run run) {
  constexpr bool kWeight = !std::is_same_v<Plan, Conv3x3>;
  const Sample sample(rows * plan.features);
  const auto blocks = static_cast<unsigned>((sample.count + 127) / 128);
  Exact* expected;
  Outcome* outcome;
  CHECK(cudaMalloc(&expected, sample.count * sizeof(Exact)));
  CHECK(cudaMallocManaged(&outcome, sizeof(Outcome)));
  expect<T><<<blocks, 128, 0, stream>>>(plan, sample, expected);
  for (int tile = 0; tile < kMultistageTileCount; ++tile, ++checks) {
    const bool same = repeats(output, bytes, [&] { return run(tile); });
    *outcome = {};
    compare<T><<<blocks, 128, 0, stream>>>(plan, splits, sample, expected, outcome);
    CHECK(cudaStreamSynchronize(stream));
    worst[kWeight] = std::max(worst[kWeight], outcome->worst);
    if (outcome->bad == 0 && same) continue;
    ++failures;
    printf(
        "BAD %s tile %d splits %d, %d x %d x %d, %ld + %ld to %d: %u of %ld entries, worst %g%s\n",
        kWeight ? "weight gradient" : "forward", tile, splits, c.batch, c.height, c.width,
        static_cast<long>(plan.x.total), static_cast<long>(plan.projected.total), c.features,
        outcome->bad, static_cast<long>(sample.count), outcome->worst,
        same ? "" : ", differs between two runs");
  }
  cudaFree(expected);
  cudaFree(outcome);
}

template <class T>
void check_case(const Case& c, Type type, int splits) {
  {
    Arrays<T> arrays;
    const Conv3x3 plan = forward_plan(c, type, arrays);
    const int64_t pixels = plan.batch * plan.height * plan.width;
    check<T>(plan, c, pixels, 1, plan.y.data[0], pixels * plan.features * 2,
             [&](int tile) { return jaxunet::cuda::multistage_forward(plan, tile, stream); });
  }
  Arrays<T> arrays;
  const auto plan = weight_gradient_plan(c, type, splits, arrays);
  check<T>(plan, c, 9 * plan.x.total + plan.projected.total, splits, plan.workspace,
           plan.workspace_floats * 4, [&](int tile) {
             return jaxunet::cuda::multistage_weight_gradient(
                 plan, tile, splits, plan.workspace, shortcut_partials(plan, splits), stream);
           });
}

// Returns the number of failures.
int check_all() {
  int splits = 0;
  for (const auto* cases : {&kSmall, &kLarge}) {
    for (const Case& c : *cases) {
      splits = splits % 5 + 1;
      check_case<__nv_bfloat16>(c, Type::kBfloat16, splits);
      check_case<__half>(c, Type::kFloat16, splits % 5 + 1);
    }
  }
  printf(
      "%d checks, %d failures; largest share of the allowed error: forward %.2f, weight gradient "
      "%.3f\n",
      checks, failures, worst[0], worst[1]);
  return failures;
}

}  // namespace
