// The dispatch of attention on Hopper: the kernel for each width (channels) and length (tokens) of
// a head.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "attention/hopper/launch.cuh"
#include "attention/hopper/launch.h"

namespace jaxunet::cuda::hopper_attention {

// True if offsets within a sample fit in 32 bits. The reader has checked the other limits: at most
// kMaxPixels rows over all heads, and arrays aligned as TMA and wide stores require (kAlignment).
template <class Plan>
bool takes(const Plan& plan) {
  return 3 * plan.tokens * plan.heads * plan.width <= INT32_MAX;
}

// Launch the kernels for the plan; return nothing for heads that other kernels should take. The
// list has the heads for which these kernels were faster than flash on an H200 at every measured
// batch; to refit the choice, run tools/gpu/harness/attn. Heads of 64 tokens and 32 channels have
// no backward kernel here, because flash_backward.cuh is faster. The cluster kernel was compared
// with the streaming ones on an H100, with 128 heads.
template <class T>
std::optional<cudaError_t> dispatch_forward(const AttentionForward& plan, int multiprocessors,
                                            cudaStream_t stream) {
  if (!takes(plan)) return std::nullopt;
  const auto is = [&](int width, int tokens) {
    return plan.width == width && plan.tokens == tokens;
  };
  if (is(32, 64)) return run_forward<ForwardTraits<T, 32, 64>>(plan, stream);
  if (is(32, 256)) return run_forward<ForwardTraits<T, 32, 256>>(plan, stream);
  if (is(64, 64)) return run_forward<ForwardTraits<T, 64, 64>>(plan, stream);
  if (plan.tokens % 128 != 0) return std::nullopt;
  if (plan.width == 64) return run_streaming_forward<T, 64>(plan, multiprocessors, stream);
  if (plan.width == 256) return run_streaming_forward<T, 256>(plan, multiprocessors, stream);
  return std::nullopt;
}

template <class T>
std::optional<cudaError_t> dispatch_backward(const AttentionBackward& plan, int multiprocessors,
                                             cudaStream_t stream) {
  if (!takes(plan)) return std::nullopt;
  const auto is = [&](int width, int tokens) {
    return plan.width == width && plan.tokens == tokens;
  };
  if (is(32, 256)) return run_backward<BackwardTraits<T, 32, 256>>(plan, multiprocessors, stream);
  if (is(64, 64)) return run_backward<BackwardTraits<T, 64, 64>>(plan, multiprocessors, stream);
  if (is(64, 256)) return run_backward<BackwardTraits<T, 64, 256>>(plan, multiprocessors, stream);
  if (is(256, 256)) return run_cluster_backward<T>(plan, stream);
  if (plan.tokens % 128 != 0) return std::nullopt;
  const auto fits = [&](auto width) {  // lse and delta of all queries fit in shared memory
    return plan.width == width &&
           plan.tokens <= StreamingTraits<T, width, Role::kQueries>::kMaxTokens;
  };
  if (fits(std::integral_constant<int, 64>()))
    return run_streaming_backward<T, 64>(plan, multiprocessors, stream);
  if (fits(std::integral_constant<int, 256>()))
    return run_streaming_backward<T, 256>(plan, multiprocessors, stream);
  return std::nullopt;
}

}  // namespace jaxunet::cuda::hopper_attention
