#include "hopper_forward_choices.cuh"

namespace jaxunet::cuda::forward {

const Launches kLaunchesBfloat16 = launches<__nv_bfloat16>();

}  // namespace jaxunet::cuda::forward
