#include "conv3x3/hopper/forward_instances.cuh"

namespace jaxunet::cuda::forward {

const Launches kLaunchesFloat16 = launches<__half>();

}  // namespace jaxunet::cuda::forward
