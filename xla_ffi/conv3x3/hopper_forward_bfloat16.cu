#include "hopper_forward_choices.cuh"

namespace jaxunet::cuda::forward {

const std::vector<Choice>& choices_bfloat16() {
  static const std::vector<Choice> all = choices<__nv_bfloat16>();
  return all;
}

}  // namespace jaxunet::cuda::forward
