// The linear layer on the CPU: a convolution without taps (plan.h).
#include "binding/cpu.h"

namespace jaxunet::cpu {

void linear(const Conv3x3& plan, Pool& pool) { conv3x3(plan, pool); }

void linear_weight_gradient(const Conv3x3WeightGradient& plan, Pool& pool) {
  conv3x3_weight_gradient(plan, pool);
}

}  // namespace jaxunet::cpu
