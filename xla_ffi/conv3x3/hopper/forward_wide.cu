#include "conv3x3/hopper/forward_instances.cuh"

namespace jaxunet::cuda::forward {

const Launches kWideLaunches = wide_launches(std::make_integer_sequence<int, kTileCount>());

}  // namespace jaxunet::cuda::forward
