// The launches of the Hopper attention kernels: tensor maps, parameters, grids.
#pragma once

#include <algorithm>

#include "attention/flash_delta.cuh"
#include "attention/hopper/backward.cuh"
#include "attention/hopper/backward_cluster.cuh"
#include "attention/hopper/forward.cuh"
#include "attention/hopper/streaming.cuh"
#include "common/integers.h"
#include "common/tensor_map.h"

namespace jaxunet::cuda::hopper_attention {

// Encodes the map of an array of `channels` x tokens x batch, with boxes of a head's width x
// `rows`.
template <class Plan>
cudaError_t map(CUtensorMap* to, const Plan& plan, const void* data, int64_t channels, int rows) {
  return tensor_map(to, plan.type, data, {channels, plan.tokens, plan.batch},
                    {static_cast<int>(plan.width), rows, 1});
}

template <class Traits>
cudaError_t run_forward(const AttentionForward& plan, cudaStream_t stream) {
  const int64_t all = plan.batch * plan.heads;
  ForwardParameters p{};
  cudaError_t error = map(&p.qkv, plan, plan.qkv, 3 * plan.heads * plan.width, kTileRows);
  p.out = plan.out;
  p.lse = plan.lse;
  p.heads = static_cast<int>(plan.heads);
  p.all_heads = static_cast<int>(all);
  p.by_heads = FastDivmod(plan.heads);
  const auto kernel = hopper_attention_forward_kernel<Traits>;
  if (error == cudaSuccess) error = allow_shared_memory(kernel, Traits::kBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = ceil_div(all * Traits::kHeadTiles, Traits::kWarpgroups);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), Traits::kThreads, Traits::kBytes,
                stream, p);
}

template <class Traits>
cudaError_t run_backward(const AttentionBackward& plan, int multiprocessors, cudaStream_t stream) {
  const int64_t channels = plan.heads * plan.width;
  BackwardParameters p{};
  cudaError_t error = map(&p.qkv, plan, plan.qkv, 3 * channels, Traits::kTokens);
  if (error == cudaSuccess) error = map(&p.out, plan, plan.out, channels, Traits::kTokens);
  if (error == cudaSuccess) error = map(&p.grad, plan, plan.grad, channels, Traits::kTokens);
  p.lse = plan.lse;
  p.dqkv = plan.dqkv;
  p.heads = static_cast<int>(plan.heads);
  p.all_heads = static_cast<int>(plan.batch * plan.heads);
  const auto kernel = hopper_attention_backward_kernel<Traits>;
  if (error == cudaSuccess) error = allow_shared_memory(kernel, Traits::kBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(std::min(p.all_heads, Traits::kBlocksPerSm * multiprocessors)),
                Traits::kThreads, Traits::kBytes, stream, p);
}

// Encodes the map of an array as chunks of 64 channels, with boxes of the given number of chunks x
// kTileRows rows.
template <class Plan>
cudaError_t chunk_map(CUtensorMap* to, const Plan& plan, const void* data, int64_t channels,
                      int chunks) {
  return tensor_map(to, plan.type, data, {64, plan.tokens, channels / 64, plan.batch},
                    {64, kTileRows, chunks, 1}, {channels, 64, plan.tokens * channels});
}

// Launches one cluster per head, with one block for each 64 rows.
template <class T>
cudaError_t run_cluster_backward(const AttentionBackward& plan, cudaStream_t stream) {
  using Traits = ClusterBackwardTraits<T>;
  const int64_t channels = plan.heads * plan.width;
  ClusterBackwardParameters p{};
  cudaError_t error = chunk_map(&p.qkv, plan, plan.qkv, 3 * channels, 1);
  if (error == cudaSuccess) error = chunk_map(&p.grad, plan, plan.grad, channels, 1);
  p.out = plan.out;
  p.grad_elements = plan.grad;
  p.lse = plan.lse;
  p.dqkv = plan.dqkv;
  p.heads = static_cast<int>(plan.heads);
  const auto kernel = hopper_cluster_attention_backward_kernel<T>;
  if (error == cudaSuccess) error = allow_shared_memory(kernel, Traits::kBytes);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(plan.batch * plan.heads * Traits::kTiles);
  return launch_clusters(kernel, dim3(blocks), Traits::kTiles, Traits::kThreads, Traits::kBytes,
                         stream, p);
}

// Launches one job (Role) of the streaming kernels.
template <class Traits, class Plan>
cudaError_t run_streaming(const Plan& plan, StreamingParameters& p, int multiprocessors,
                          cudaStream_t stream) {
  p.heads = static_cast<int>(plan.heads);
  p.tokens = static_cast<int>(plan.tokens);
  p.units = static_cast<int>(plan.batch * plan.heads * (plan.tokens / Traits::kUnitRows));
  void (*kernel)(StreamingParameters);
  if constexpr (Traits::kBackward) {
    kernel = hopper_streaming_attention_backward_kernel<Traits>;
  } else {
    kernel = hopper_streaming_attention_forward_kernel<Traits>;
  }
  const cudaError_t error = allow_shared_memory(kernel, Traits::kBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(std::min(p.units, multiprocessors)), Traits::kThreads, Traits::kBytes,
                stream, p);
}

template <class T, int kWidth>
cudaError_t run_streaming_forward(const AttentionForward& plan, int multiprocessors,
                                  cudaStream_t stream) {
  StreamingParameters p{};
  const cudaError_t error =
      chunk_map(&p.qkv, plan, plan.qkv, 3 * plan.heads * plan.width, kWidth / 64);
  if (error != cudaSuccess) return error;
  p.lse = plan.lse;
  p.result = plan.out;
  return run_streaming<StreamingTraits<T, kWidth, Role::kForward>>(plan, p, multiprocessors,
                                                                   stream);
}

// streaming.cuh describes the three launches.
template <class T, int kWidth>
cudaError_t run_streaming_backward(const AttentionBackward& plan, int multiprocessors,
                                   cudaStream_t stream) {
  StreamingParameters p{};
  const int64_t channels = plan.heads * plan.width;
  cudaError_t error = chunk_map(&p.qkv, plan, plan.qkv, 3 * channels, kWidth / 64);
  if (error == cudaSuccess) error = chunk_map(&p.grad, plan, plan.grad, channels, kWidth / 64);
  p.out = plan.out;
  p.lse = const_cast<float*>(plan.lse);
  p.result = plan.dqkv;
  const auto run = [&](auto traits) {
    if (error == cudaSuccess)
      error = run_streaming<decltype(traits)>(plan, p, multiprocessors, stream);
  };
  if constexpr (kWidth == 256) {
    run(StreamingTraits<T, kWidth, Role::kQueries>());
    run(StreamingTraits<T, kWidth, Role::kKeys>());
    run(StreamingTraits<T, kWidth, Role::kValues>());
  } else {
    if (error == cudaSuccess) error = launch_delta<T, kWidth>(plan, stream);
    run(StreamingTraits<T, kWidth, Role::kKeysValues>());
    run(StreamingTraits<T, kWidth, Role::kQueries>());
  }
  return error;
}

}  // namespace jaxunet::cuda::hopper_attention
