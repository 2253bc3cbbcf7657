// The weight gradients of several convolutions and linear layers in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "conv3x3/plan.h"

namespace jaxunet {

class Reader;

struct WeightGradients {
  std::vector<Conv3x3WeightGradient> members;  // of one type, and without workspaces
  std::vector<NormSums> norms;                 // of norms that precede no member
  // Uninitialized memory for the partial results of all members, at least the sum of their
  // `minimum_workspace`.
  float* workspace;
  int64_t workspace_floats;
};

WeightGradients read_weight_gradients(Reader& call);

}  // namespace jaxunet
