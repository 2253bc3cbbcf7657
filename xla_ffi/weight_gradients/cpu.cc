// Several weight gradients on the CPU, one after the other, and the sums of norms.
#include "binding/cpu.h"

namespace jaxunet::cpu {

void weight_gradients(const WeightGradients& plan, Pool& pool) {
  for (const Conv3x3WeightGradient& member : plan.members) conv3x3_weight_gradient(member, pool);
  for (const NormSums& norm : plan.norms) add_samples(norm);
}

}  // namespace jaxunet::cpu
