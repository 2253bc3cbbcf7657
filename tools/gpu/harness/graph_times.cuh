// Shared by the harnesses that time one kernel after another.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Ends the program if a CUDA call failed.
inline void cuda_ok(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAIL CUDA: %s\n", cudaGetErrorString(error));
  std::fflush(stdout);
  std::exit(1);
}

// Returns the microseconds per call of `launches` launches of a CUDA graph, sorted. The graph has
// the calls call(0) to call(calls - 1), which return a cudaError_t. `warmup` launches come first
// and do not count. The kernels must have been loaded by an earlier call outside of the graph.
template <class Call>
std::vector<float> graph_times(cudaStream_t stream, int calls, int warmup, int launches,
                               const Call& call) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  cuda_ok(cudaEventCreate(&begin));
  cuda_ok(cudaEventCreate(&end));
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) cuda_ok(call(i));
  cuda_ok(cudaStreamEndCapture(stream, &graph));
  cuda_ok(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < warmup; ++i) cuda_ok(cudaGraphLaunch(executable, stream));
  std::vector<float> times(launches);
  for (float& time : times) {
    cuda_ok(cudaEventRecord(begin, stream));
    cuda_ok(cudaGraphLaunch(executable, stream));
    cuda_ok(cudaEventRecord(end, stream));
    cuda_ok(cudaEventSynchronize(end));
    cuda_ok(cudaEventElapsedTime(&time, begin, end));
    time *= 1000.0f / static_cast<float>(calls);
  }
  cuda_ok(cudaGraphExecDestroy(executable));
  cuda_ok(cudaGraphDestroy(graph));
  cuda_ok(cudaEventDestroy(begin));
  cuda_ok(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times;
}
