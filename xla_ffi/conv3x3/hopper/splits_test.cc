// The splits that hopper_choices gives to the weight gradients of one launch. Prints one line for
// each case; ../test_splits.py runs it.
#include "conv3x3/hopper/splits.h"

#include <cstdio>

namespace jaxunet::cuda {

// A stand-in for the kernel's tiling: tiles of 64 channels and 64 features, strips of 64 pixels.
WeightGradientTiling hopper_weight_gradient_tiling(const Conv3x3WeightGradient& plan,
                                                   int max_block_chunks) {
  const int64_t features = ceil_div(plan.features, 64);
  WeightGradientTiling tiling{};
  tiling.tiles = ceil_div(plan.x.total, 64) * features;
  tiling.strips_of_sample = ceil_div(plan.height * plan.width, 64);
  tiling.samples = 1;
  tiling.block_chunks = max_block_chunks;
  tiling.shortcut_tiles = ceil_div(plan.projected.total, 64 * max_block_chunks) * features;
  tiling.shortcut_time = tiling.shortcut_size = 0.25;
  return tiling;
}

namespace {

constexpr int kMultiprocessors = 132;

Conv3x3WeightGradient member(int64_t batch, int64_t side, int64_t channels, int64_t projected,
                             int64_t features) {
  Conv3x3WeightGradient plan{};
  plan.type = Type::kBfloat16;
  plan.batch = batch;
  plan.height = plan.width = side;
  plan.x.total = channels;
  plan.projected.total = projected;
  plan.features = features;
  plan.dkernel.type = plan.dshift.type = plan.dshortcut.type = Type::kFloat32;
  return plan;
}

void print(const char* name, const std::vector<Conv3x3WeightGradient>& plans) {
  std::vector<Partials> partials;
  for (const auto& plan : plans) partials.emplace_back(plan, true);
  std::printf("%s:", name);
  for (const Choice& choice : hopper_choices(partials, int64_t{1} << 30, kMultiprocessors)) {
    const bool linear = choice.tiling.tiles == 0;
    std::printf(" %d", static_cast<int>(linear ? choice.splits.shortcut : choice.splits.kernel));
  }
  std::printf("\n");
}

}  // namespace
}  // namespace jaxunet::cuda

int main() {
  using namespace jaxunet::cuda;
  const auto convolution = member(256, 16, 64, 0, 64), shortcut = member(256, 16, 64, 64, 64),
             linear = member(256, 16, 0, 64, 192);
  print("convolution", {convolution});
  print("convolution and linear layer", {convolution, linear});
  print("convolution with shortcut and linear layer", {shortcut, linear});
}
