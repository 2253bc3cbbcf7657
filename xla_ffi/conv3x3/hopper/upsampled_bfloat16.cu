#include "conv3x3/hopper/upsampled_instances.cuh"

namespace jaxunet::cuda::forward {

const UpsampledLaunches kUpsampledBfloat16 = upsampled_launches<__nv_bfloat16>();

}  // namespace jaxunet::cuda::forward
