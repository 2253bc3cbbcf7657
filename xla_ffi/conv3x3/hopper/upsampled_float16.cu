#include "conv3x3/hopper/upsampled_instances.cuh"

namespace jaxunet::cuda::forward {

const UpsampledLaunches kUpsampledFloat16 = upsampled_launches<__half>();

}  // namespace jaxunet::cuda::forward
