#include "hopper_forward_choices.cuh"

namespace jaxunet::cuda::forward {

const Launches kLaunchesFloat16 = launches<__half>();

}  // namespace jaxunet::cuda::forward
