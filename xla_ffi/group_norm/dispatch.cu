// Chooses the GroupNorm kernels of a call. Each kind of call takes the first line below whose
// kernels accept it. The rules are the functions *_tiling() in the headers *_tiling.h, which return
// nothing if a kernel does not accept a call, and faster_than_streaming(), of which there is one
// for the register-resident forward kernel and one for the smem-resident backward kernel. A sample
// is large if streaming_tiling() returns a tiling.
//
//   statistics alone   statistics.cu
//                      forward_smem_resident.cu, which then writes no y: very wide groups (more
//                      than 4,096 channels of 16 bits)
//   y and statistics   forward_register_resident.cu: small samples; large ones that a cluster can
//                      hold, or, without clusters, where it is faster_than_streaming()
//                      forward_streaming.cu: large samples; two launches
//                      forward_smem_resident.cu: the rest
//   backward           backward_smem_resident.cu: where it is faster_than_streaming()
//                      backward_streaming.cu: large samples; two launches
//                      backward_smem_resident.cu: the rest
//
// parameter_gradients.cu follows backward_smem_resident.cu, unless a weight gradient adds the sums;
// backward_streaming.cu sums the gradients of scale and offset itself.
#include "common/device.h"
#include "kernels.h"
#include "launch.h"

namespace jaxunet::cuda {
namespace {

// Kernels use clusters only on Hopper, because builds contain code with clusters for no other GPU
// (common/kernel_set.h).
cudaError_t device_limits(KernelSet kernels, DeviceLimits* limits) {
  Device device;
  const cudaError_t error = describe(kernels, &device);
  *limits = {device.multiprocessors, device.smem_bytes, device.hopper ? kPortableCluster : 1};
  return error;
}

// `plan`: NormInput or NormGradient.
template <class Plan>
std::optional<StreamingTiling> streaming_tiling_of(const Plan& plan, const DeviceLimits& limits,
                                                   int vector) {
  return streaming_tiling(limits, kStreamingMinElements, plan.batch, plan.pixels, plan.x.total,
                          plan.x.total / plan.groups, vector, element_bytes(plan.type));
}

cudaError_t forward(const NormInput& plan, const ForwardOutputs& to, cudaStream_t stream,
                    KernelSet kernels) {
  if (plan.batch == 0 || plan.x.total == 0) return cudaSuccess;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(kernels, &limits); error != cudaSuccess) return error;
  const int vector = vector_of(plan.x, plan.type);
  const auto tiling_of = [&](const auto& choose) {
    return choose(limits, plan.batch, plan.pixels, plan.x.total, plan.x.total / plan.groups, vector,
                  element_bytes(plan.type));
  };
  if (to.y == nullptr) {
    if (const auto only = tiling_of(statistics_tiling))
      return statistics(plan, *only, vector, to.statistics, stream);
  } else {
    const auto large = streaming_tiling_of(plan, limits, vector);
    const auto small = tiling_of(register_resident_tiling);
    if (small &&
        (!large || faster_than_streaming(*small, limits, vector, element_bytes(plan.type))))
      return register_resident_forward(plan, *small, to, stream);
    if (large) {
      if (const auto cluster = register_resident_cluster_tiling(limits, plan.pixels, plan.x.total,
                                                                plan.x.total / plan.groups, vector,
                                                                element_bytes(plan.type)))
        return register_resident_forward(plan, *cluster, to, stream);
    }
    const auto first = tiling_of(statistics_tiling);
    if (large && first) {
      return streaming_forward(plan, *first, second_pass_tiling(*large, limits, plan.batch), vector,
                               to, stream);
    }
  }
  return smem_resident_forward(plan, limits, vector, to, stream);
}

}  // namespace

cudaError_t norm_forward(const NormForward& plan, cudaStream_t stream, KernelSet kernels) {
  return forward(plan,
                 {{nullptr, nullptr, plan.mean, plan.inverse}, plan.silu, plan.y, plan.dropout},
                 stream, kernels);
}

cudaError_t norm_dropout_forward(const NormForward& plan, cudaStream_t stream, KernelSet kernels) {
  return norm_forward(plan, stream, kernels);
}

cudaError_t norm_statistics(const NormStatistics& plan, cudaStream_t stream, KernelSet kernels) {
  return forward(plan, {{plan.a, plan.b, plan.mean, plan.inverse}, false, nullptr}, stream,
                 kernels);
}

cudaError_t norm_gradient(const NormGradient& plan, cudaStream_t stream, KernelSet kernels) {
  if (plan.x.total == 0) return cudaSuccess;
  if (plan.batch == 0) return launch_parameter_gradients(plan, stream);  // zeros
  DeviceLimits limits;
  cudaError_t error = device_limits(kernels, &limits);
  if (error != cudaSuccess) return error;
  const int vector = vector_of(plan.x, plan.type);
  const BackwardTiling tiling =
      backward_tiling(limits, plan.batch, plan.pixels, plan.x.total, plan.x.total / plan.groups,
                      vector, element_bytes(plan.type), plan.added_count);
  if (!faster_than_streaming(tiling, limits, element_bytes(plan.type))) {
    if (const auto streaming = streaming_tiling_of(plan, limits, vector))
      return streaming_gradient(plan, *streaming, limits, vector, stream);
  }
  check(tiling, limits);
  error = smem_resident_gradient(plan, tiling, vector, stream);
  return error == cudaSuccess ? launch_parameter_gradients(plan, stream) : error;
}

cudaError_t norm_dropout_gradient(const NormGradient& plan, cudaStream_t stream,
                                  KernelSet kernels) {
  return norm_gradient(plan, stream, kernels);
}

}  // namespace jaxunet::cuda
