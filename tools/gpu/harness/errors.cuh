// Shared by the harnesses: the errors of an array against float64.
#pragma once

#include <cmath>
#include <cstdint>

#include "graph_times.cuh"

// Both are NaN if the array has a NaN.
struct Error {
  double rel = 0, max = 0;  // norm of the error / norm of the reference; largest error
};

// sums: sum of squared errors, sum of squared reference values, largest error. NaN counts as 1e30.
template <class T>
__global__ void add_errors(const T* x, const double* reference, int64_t count, double* sums) {
  double squares = 0, norm = 0, largest = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    double error = fabs(static_cast<double>(static_cast<float>(x[i])) - reference[i]);
    if (!(error < 1e30)) error = 1e30;
    squares += error * error;
    norm += reference[i] * reference[i];
    largest = fmax(largest, error);
  }
  atomicAdd(sums, squares);
  atomicAdd(sums + 1, norm);
  atomicMax(reinterpret_cast<unsigned long long*>(sums + 2),
            static_cast<unsigned long long>(__double_as_longlong(largest)));
}

template <class T>
Error error_of(const T* x, const double* reference, int64_t count, cudaStream_t stream = nullptr) {
  static double* sums = nullptr;
  if (!sums) CHECK(cudaMalloc(&sums, 3 * sizeof(double)));
  double host[3];
  CHECK(cudaMemsetAsync(sums, 0, sizeof host, stream));
  add_errors<<<264, 256, 0, stream>>>(x, reference, count, sums);
  CHECK(cudaMemcpyAsync(host, sums, sizeof host, cudaMemcpyDeviceToHost, stream));
  CHECK(cudaStreamSynchronize(stream));
  if (host[2] >= 1e30) return {NAN, NAN};
  return {std::sqrt(host[0] / std::fmax(host[1], 1e-300)), host[2]};
}
