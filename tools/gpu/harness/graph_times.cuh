// Shared by the harnesses: the errors of CUDA calls, and the times of CUDA graphs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Ends the program if a CUDA call failed.
#define CHECK(...)                                                              \
  do {                                                                          \
    const cudaError_t error_ = (__VA_ARGS__);                                   \
    if (error_ != cudaSuccess) {                                                \
      std::printf("FAIL CUDA %s:%d %s: %s\n", __FILE__, __LINE__, #__VA_ARGS__, \
                  cudaGetErrorString(error_));                                  \
      std::fflush(stdout);                                                      \
      std::exit(1);                                                             \
    }                                                                           \
  } while (0)

// Returns a CUDA graph of the calls call(0) to call(calls - 1), which return a cudaError_t. Their
// kernels must have been loaded by an earlier call outside of the graph.
template <class Call>
cudaGraphExec_t graph_of(cudaStream_t stream, int calls, const Call& call) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) CHECK(call(i));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  return executable;
}

// Returns the microseconds of some launches of a graph, one after another.
inline float launch_us(cudaStream_t stream, cudaGraphExec_t graph, int launches = 1) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (!begin) {
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
  }
  float ms;
  CHECK(cudaEventRecord(begin, stream));
  for (int i = 0; i < launches; ++i) CHECK(cudaGraphLaunch(graph, stream));
  CHECK(cudaEventRecord(end, stream));
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  return 1000 * ms;
}

// Returns the microseconds per call of `rounds` launches of each graph, sorted. The graphs, of
// `calls` calls each, are launched in turns, forwards and backwards, so that a change of the clock
// affects all alike. `warmup` rounds come first and do not count.
inline std::vector<std::vector<float>> times_in_turns(cudaStream_t stream,
                                                      const std::vector<cudaGraphExec_t>& graphs,
                                                      int calls, int warmup, int rounds) {
  std::vector<std::vector<float>> times(graphs.size());
  for (int round = -warmup; round < rounds; ++round) {
    for (size_t i = 0; i < graphs.size(); ++i) {
      const size_t n = round % 2 ? graphs.size() - 1 - i : i;
      const float us = launch_us(stream, graphs[n]) / static_cast<float>(calls);
      if (round >= 0) times[n].push_back(us);
    }
  }
  for (auto& own : times) std::sort(own.begin(), own.end());
  return times;
}

// The same for a single graph of the calls of `graph_of`.
template <class Call>
std::vector<float> graph_times(cudaStream_t stream, int calls, int warmup, int launches,
                               const Call& call) {
  const cudaGraphExec_t graph = graph_of(stream, calls, call);
  const auto times = times_in_turns(stream, {graph}, calls, warmup, launches);
  CHECK(cudaGraphExecDestroy(graph));
  return times[0];
}
