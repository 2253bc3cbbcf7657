// The choice of tiles and splits for the Hopper weight gradient, by a model of its time.
#pragma once

#include <cstdint>
#include <vector>

#include "conv3x3/kernels.h"
#include "conv3x3/partials.h"

namespace jaxunet::cuda {

struct Choice {
  WeightGradientTiling tiling;
  Splits splits;
  double microseconds = 0;  // estimated; hopper_choice only
};

// The choice with the least estimated time, for a launch of one gradient.
Choice hopper_choice(const Partials& partials, int multiprocessors);
// One choice for each gradient of a launch of several. Their partial results together have at most
// `workspace_floats`, unless no gradient is split.
std::vector<Choice> hopper_choices(const std::vector<Partials>& gradients, int64_t workspace_floats,
                                   int multiprocessors);

// Floats in the workspace for a choice.
int64_t floats_of(const Partials& partials, const Choice& choice);

// What the kernel needs to compute a gradient by a choice.
HopperWeightGradient hopper_gradient(const Partials& partials, const Choice& choice);
// The reductions that have to follow.
std::vector<SplitKReduction> hopper_reductions(const Partials& partials, const Choice& choice);

}  // namespace jaxunet::cuda
