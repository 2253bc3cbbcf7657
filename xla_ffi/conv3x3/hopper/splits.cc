// The choice of tiles and splits for the Hopper weight gradient.
#include "conv3x3/hopper/splits.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/integers.h"

namespace jaxunet::cuda {
namespace {

// Estimated times of the Hopper weight gradient, in microseconds on an H200. To refit: time the
// weight gradients of a training step with forced numbers of splits around the chosen ones, and
// solve for the three constants by least squares.
constexpr double kStripTime = 0.7;    // to multiply a strip of 64 pixels
constexpr double kBlockTime = 5;      // to start a block and to store its partial results
constexpr double kReduceTime = 0.03;  // to reduce the partial results of a block

// n splits for the kernel's gradient, and as many for the shortcut's that blocks of both kinds take
// equally long.
Splits balanced_splits(const WeightGradientTiling& tiling, int64_t n, int64_t strips) {
  if (tiling.tiles == 0) return {1, n};  // a linear layer
  const double shortcut = static_cast<double>(n) * tiling.shortcut_time;
  return {n, std::clamp<int64_t>(static_cast<int64_t>(shortcut + 0.5), 1, strips)};
}

// The splits with the least estimated time.
Choice hopper_splits(const WeightGradientTiling& tiling, const Partials& partials,
                     int multiprocessors) {
  const int64_t strips = strips_of(tiling, partials.plan.batch);
  const bool shortcut_alone = tiling.tiles == 0;  // a linear layer
  const auto balanced = [&](int64_t n) { return balanced_splits(tiling, n, strips); };
  const auto microseconds = [&](const Splits& splits) {
    const int64_t blocks = tiling.tiles * splits.kernel + tiling.shortcut_tiles * splits.shortcut;
    const int64_t waves = ceil_div(blocks, multiprocessors);
    const double strips_of_block =
        shortcut_alone
            ? static_cast<double>(ceil_div(strips, splits.shortcut)) * tiling.shortcut_time
            : static_cast<double>(ceil_div(strips, splits.kernel));
    const double reduced = splits.kernel * splits.shortcut > 1 ? static_cast<double>(blocks) : 0.0;
    return static_cast<double>(waves) * (kStripTime * strips_of_block + kBlockTime) +
           kReduceTime * reduced * (shortcut_alone ? tiling.shortcut_size : 1.0);
  };
  Choice best{tiling, balanced(1), microseconds(balanced(1))};
  for (int64_t n = 2; n <= std::min(strips, int64_t{multiprocessors}); ++n) {
    const Choice choice{tiling, balanced(n), microseconds(balanced(n))};
    if (choice.microseconds < best.microseconds &&
        partials.fit(choice.splits, split_k_of(tiling, partials.plan.batch, n).slots())) {
      best = choice;
    }
  }
  return best;
}

// --- several weight gradients in one launch ---

constexpr int64_t kWhole = int64_t{1} << 40;  // a length that no block has

// The choice for a gradient whose blocks take about as long as `length` strips of the kernel's.
Choice choice_of_length(const WeightGradientTiling& tiling, const Partials& partials,
                        int64_t length) {
  const int64_t strips = strips_of(tiling, partials.plan.batch);
  const double share = tiling.tiles == 0 ? tiling.shortcut_time : 1;
  const int64_t n = static_cast<int64_t>(
      std::ceil(share * static_cast<double>(strips) / static_cast<double>(length)));
  return {tiling, balanced_splits(tiling, std::clamp<int64_t>(n, 1, strips), strips)};
}

// Blocks that take equally long.
struct Blocks {
  double microseconds;  // each
  int64_t count;
};

// Estimated time of a launch and of the reduction after it. Blocks start in the order of their
// time, longest first, so at the end a multiprocessor waits for half of one of the shortest blocks.
double microseconds_of(const std::vector<Partials>& gradients, const std::vector<Choice>& choices,
                       int multiprocessors) {
  std::vector<Blocks> all;
  double sum = 0, reduced = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const WeightGradientTiling& tiling = choices[i].tiling;
    const double strips = static_cast<double>(strips_of(tiling, gradients[i].plan.batch));
    const auto add = [&](int64_t tiles, int64_t splits, double time, double size) {
      if (tiles == 0) return;  // a linear layer, or no shortcut
      const Blocks blocks{kStripTime * time * strips / static_cast<double>(splits) + kBlockTime,
                          tiles * splits};
      all.push_back(blocks);
      sum += blocks.microseconds * static_cast<double>(blocks.count);
      if (splits > 1) reduced += size * static_cast<double>(blocks.count);
    };
    add(tiling.tiles, choices[i].splits.kernel, 1, 1);
    add(tiling.shortcut_tiles, choices[i].splits.shortcut, tiling.shortcut_time,
        tiling.shortcut_size);
  }
  std::sort(all.begin(), all.end(),
            [](const Blocks& a, const Blocks& b) { return a.microseconds < b.microseconds; });
  int64_t last = 0;
  double wait = 0;
  for (size_t i = 0; i < all.size() && last < multiprocessors; last += all[i++].count)
    wait = all[i].microseconds / 2;
  return std::max(sum / multiprocessors + wait, all.back().microseconds) + kReduceTime * reduced;
}

}  // namespace

// The tiles and splits with the least estimated time. Without x (a linear layer), tiles of fewer
// chunks may be faster if there are few pixels: they need fewer splits to occupy the device.
Choice hopper_choice(const Partials& partials, int multiprocessors) {
  const WeightGradientTiling tiling = hopper_weight_gradient_tiling(partials.plan);
  Choice best = hopper_splits(tiling, partials, multiprocessors);
  for (int chunks = tiling.block_chunks - 1; tiling.tiles == 0 && chunks > 0; --chunks) {
    const WeightGradientTiling smaller = hopper_weight_gradient_tiling(partials.plan, chunks);
    if (smaller.block_chunks < chunks) continue;  // same as a later iteration
    const Choice choice = hopper_splits(smaller, partials, multiprocessors);
    if (choice.microseconds < best.microseconds) best = choice;
  }
  return best;
}

std::vector<Choice> hopper_choices(const std::vector<Partials>& gradients, int64_t workspace_floats,
                                   int multiprocessors) {
  std::vector<WeightGradientTiling> tilings;
  int64_t longest = 1;
  for (const Partials& partials : gradients) {
    tilings.push_back(hopper_weight_gradient_tiling(partials.plan));
    longest = std::max(longest, strips_of(tilings.back(), partials.plan.batch));
  }
  std::vector<Choice> best;  // the first is without splits, and always fits
  double least = 0;
  constexpr int kLengths = 64;
  for (int n = 0; n <= kLengths; ++n) {
    const int64_t length = n == 0 ? kWhole : ceil_div(longest, n);
    std::vector<Choice> choices;
    int64_t floats = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      choices.push_back(choice_of_length(tilings[i], gradients[i], length));
      floats += floats_of(gradients[i], choices.back());
    }
    const double microseconds = microseconds_of(gradients, choices, multiprocessors);
    if (best.empty() || (microseconds < least && floats <= workspace_floats)) {
      best = std::move(choices);
      least = microseconds;
    }
  }
  return best;
}

namespace {

struct SplitKs {
  SplitK kernel, shortcut;
  int slots;  // for the sums of dy

  SplitKs(const Partials& partials, const Choice& choice)
      : kernel(split_k_of(choice.tiling, partials.plan.batch, choice.splits.kernel)),
        shortcut(split_k_of(choice.tiling, partials.plan.batch, choice.splits.shortcut)),
        slots((choice.tiling.tiles > 0 ? kernel : shortcut).slots()) {}
};

// Only if there is a reduction to read them; otherwise the kernel writes the gradient itself.
bool accumulator_tiles(const Partials& partials, const Choice& choice) {
  return choice.tiling.whole_tiles && partials.kernel_floats(choice.splits) > 0;
}

}  // namespace

int64_t floats_of(const Partials& partials, const Choice& choice) {
  return partials.floats(choice.splits, SplitKs(partials, choice).slots);
}

HopperWeightGradient hopper_gradient(const Partials& partials, const Choice& choice) {
  const Splits& splits = choice.splits;
  const SplitKs split_k(partials, choice);
  const ShiftPartials shift{partials.shift_at(splits), split_k.slots,
                            static_cast<int>(partials.plan.batch),
                            static_cast<int>(partials.plan.features)};
  return {&partials.plan,
          choice.tiling,
          split_k.kernel,
          split_k.shortcut,
          partials.kernel_at(splits),
          partials.shortcut_at(splits),
          accumulator_tiles(partials, choice),
          shift};
}

std::vector<SplitKReduction> hopper_reductions(const Partials& partials, const Choice& choice) {
  return partials.reductions(choice.splits, accumulator_tiles(partials, choice),
                             SplitKs(partials, choice).slots);
}

}  // namespace jaxunet::cuda
