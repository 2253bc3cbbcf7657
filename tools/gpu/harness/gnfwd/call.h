// A call of GroupNorm's forward pass, and the functions of adapter.cu. bench.cu includes this
// instead of the kernels' headers, because the two checkouts have different ones.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
struct Call {
  int type;  // 0: float32, 1: float16, 2: bfloat16
  int64_t batch, pixels, groups;
  int parts;
  void* x[4];
  int64_t channels[4];
  const float *scale, *offset;
  int64_t row_stride;  // of scale and offset; 0: all samples share a row
  int silu;
  void* y;                        // null: the statistics alone
  float *a, *b, *mean, *inverse;  // group_norm/plan.h; a and b only without y
};
// The kernels that the dispatch of the baseline, and of this checkout, chooses.
cudaError_t run_old(const Call&, cudaStream_t);
cudaError_t run_new(const Call&, cudaStream_t);
// Kernels of this checkout with a given tiling. vectors: per pixel and block; ranks: blocks of a
// cluster; k: pixels per thread. The last two return false if they do not accept the call or the
// tiling; if `run` is false, they do nothing else.
cudaError_t new_statistics(const Call& c, int vectors, int threads, int ranks, cudaStream_t s);
bool new_registers(const Call& c, int vectors, int k, int ranks, cudaStream_t s, bool run,
                   cudaError_t* e);
// ranks: for the first launch; 0: the default tiling.
bool new_streaming(const Call& c, int ranks, cudaStream_t s, bool run, cudaError_t* e);
