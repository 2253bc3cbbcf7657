// Reads and checks calls of several weight gradients: the operands and results of the members' own
// calls one after the other, except for their workspaces, then one workspace for all of them.
// Shared by the CPU and the CUDA build.
#include "conv3x3/read.h"

#include "linear/plan.h"
#include "weight_gradients/plan.h"

namespace jaxunet {

WeightGradients read_weight_gradients(Reader& call) {
  WeightGradients plan{};
  const int64_t count = call.integer("members", 1);
  int64_t minimum = 0;
  for (int64_t i = 0; i < count; ++i) {
    call.member(i);
    plan.members.push_back(call.flag("linear") ? read_linear_weight_gradient_member(call)
                                               : read_conv3x3_weight_gradient_member(call));
    if (plan.members[i].type != plan.members[0].type)
      call.fail("expected the type of member 0, found another");
    minimum += minimum_workspace(plan.members[i]);
  }
  call.shared();
  read_workspace(call, plan, minimum);
  return plan;
}

}  // namespace jaxunet
