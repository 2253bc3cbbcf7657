#include "hopper_forward_choices.cuh"

namespace jaxunet::cuda::forward {

const std::vector<Choice>& choices_float16() {
  static const std::vector<Choice> all = choices<__half>();
  return all;
}

}  // namespace jaxunet::cuda::forward
