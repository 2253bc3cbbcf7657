#include "conv3x3/hopper/forward_instances.cuh"

namespace jaxunet::cuda::forward {

const Launches kLaunchesBfloat16 = launches<__nv_bfloat16>();

}  // namespace jaxunet::cuda::forward
