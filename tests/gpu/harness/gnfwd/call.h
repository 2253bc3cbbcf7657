#pragma once
#include <cuda_runtime.h>

#include <cstdint>
struct Call {
  int type;
  int64_t batch, pixels, groups;
  int parts;
  void* x[4];
  int64_t channels[4];
  const float *scale, *offset;
  int64_t row_stride;
  int silu;
  void* y;
  float *a, *b, *mean, *inverse;
};
cudaError_t run_old(const Call&, cudaStream_t);
cudaError_t run_new(const Call&, cudaStream_t);
cudaError_t new_statistics(const Call& c, int vectors, int threads, int ranks, cudaStream_t s);
bool new_registers(const Call& c, int vectors, int k, cudaStream_t s, bool run, cudaError_t* e);
bool new_streaming(const Call& c, int ranks, cudaStream_t s, bool run, cudaError_t* e);
