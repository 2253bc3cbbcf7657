// Compile-time assertions about the choices of dispatch.h and multistage.h for GPUs without the
// Hopper kernels, for test_tile_choices.py.

#include "common/kernel_set.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/portable/multistage.h"

namespace jaxunet::cuda {
namespace {

constexpr float kSomewhere = 0;

constexpr Parts parts(int64_t first, int64_t second = 0) {
  return {second ? 2 : 1, {}, {first, second}, first + second};
}

template <class Plan>
constexpr Plan plan_of(int64_t batch, int64_t side, const Parts& x, int64_t features) {
  Plan plan{};
  plan.type = Type::kBfloat16;
  plan.batch = batch;
  plan.height = plan.width = side;
  plan.features = features;
  plan.x = x;
  return plan;
}
constexpr Conv3x3 forward(int64_t batch, int64_t side, const Parts& x, int64_t features) {
  auto plan = plan_of<Conv3x3>(batch, side, x, features);
  plan.y = parts(features);
  return plan;
}
constexpr Conv3x3WeightGradient weight_gradient(int64_t batch, int64_t side, const Parts& x,
                                                int64_t features) {
  return plan_of<Conv3x3WeightGradient>(batch, side, x, features);
}

constexpr Kernel portable(const Conv3x3& plan) { return forward_kernel(plan, false); }
constexpr Kernel portable(const Conv3x3WeightGradient& plan) {
  return weight_gradient_kernel(plan, false);
}

static_assert(portable(forward(3, 9, parts(64, 72), 24)) == Kernel::kMultistage);
static_assert(portable(forward(3, 9, parts(64, 4), 24)) == Kernel::kImplicitGemm);
static_assert(portable(forward(3, 9, parts(64, 72), 20)) == Kernel::kImplicitGemm);
static_assert(portable(forward(3, 9, parts(8), 24)) == Kernel::kFewChannels);
static_assert(portable(forward(3, 9, parts(24), 8)) == Kernel::kFewFeatures);
static_assert(portable(weight_gradient(3, 9, parts(64, 72), 24)) == Kernel::kMultistage);
static_assert(portable(weight_gradient(3, 9, parts(64, 4), 24)) == Kernel::kImplicitGemm);
static_assert(portable(weight_gradient(3, 9, parts(64, 72), 20)) == Kernel::kImplicitGemm);
static_assert(forward_kernel(forward(3, 3, parts(64), 64), true) == Kernel::kMultistage);
static_assert(weight_gradient_kernel(weight_gradient(3, 3, parts(64), 64), true) ==
              Kernel::kMultistage);

constexpr Conv3x3 varied(void (*change)(Conv3x3&)) {
  Conv3x3 plan = forward(3, 9, parts(64), 64);
  change(plan);
  return plan;
}
static_assert(portable(varied([](Conv3x3& p) { p.flipped = true; })) == Kernel::kMultistage);
static_assert(portable(varied([](Conv3x3& p) { p.residual = parts(40, 24); })) ==
              Kernel::kMultistage);
static_assert(portable(varied([](Conv3x3& p) { p.residual = parts(44, 20); })) ==
              Kernel::kImplicitGemm);
static_assert(portable(varied([](Conv3x3& p) { p.projected = parts(8, 24); })) ==
              Kernel::kMultistage);
static_assert(portable(varied([](Conv3x3& p) { p.projected = parts(12, 24); })) ==
              Kernel::kImplicitGemm);
static_assert(portable(varied([](Conv3x3& p) { p.x = {}, p.projected = parts(8); })) ==
              Kernel::kMultistage);
static_assert(portable(varied([](Conv3x3& p) { p.a.data = &kSomewhere; })) ==
              Kernel::kImplicitGemm);
static_assert(portable(varied([](Conv3x3& p) { p.wide = true; })) == Kernel::kImplicitGemm);
static_assert(portable(varied([](Conv3x3& p) { p.type = Type::kFloat32; })) ==
              Kernel::kImplicitGemm);
// More rows or columns of a matrix than the kernels can count.
static_assert(portable(varied([](Conv3x3& p) { p.x = parts(int64_t{1} << 28); })) ==
              Kernel::kImplicitGemm);
static_assert(portable(weight_gradient(1, 1, parts(64), int64_t{1} << 31)) ==
              Kernel::kImplicitGemm);

// GPUs of compute capability 8.0, 8.6 and 8.9, by their multiprocessors, and an H200.
constexpr int kMultiprocessors[] = {20, 46, 82, 108, 128, 132};

constexpr const MultistageTile& tile_of(const Conv3x3& plan, int multiprocessors) {
  return kMultistageTiles[multistage_tile(plan, multiprocessors)];
}

// Large images fill every multiprocessor with large tiles, which are no wider than the features;
// for one small image, small tiles occupy more multiprocessors.
constexpr bool large_tiles_for_large_images() {
  for (const int multiprocessors : kMultiprocessors) {
    const MultistageTile wide = tile_of(forward(256, 64, parts(128), 128), multiprocessors),
                         narrow = tile_of(forward(256, 64, parts(128), 64), multiprocessors),
                         small = tile_of(forward(1, 8, parts(256), 256), multiprocessors);
    if (wide.m * wide.n != 128 * 128 || narrow.m < 128 || narrow.n != 64 ||
        small.m * small.n != 64 * 64)
      return false;
  }
  return true;
}
static_assert(large_tiles_for_large_images());

// There is at least one split, there are at most as many as fit in the workspace, and each has
// enough pixels to fill the ring.
constexpr bool valid(const Conv3x3WeightGradient& plan) {
  const int64_t pixels = plan.batch * plan.height * plan.width;
  for (const int multiprocessors : kMultiprocessors) {
    for (const int64_t most : {1, 2, 7, 528}) {
      const MultistageChoice choice = multistage_choice(plan, multiprocessors, most);
      if (choice.tile < 0 || choice.tile >= kMultistageTileCount) return false;
      if (choice.splits < 1 || choice.splits > most) return false;
      if (choice.splits > 1 && pixels < 128 * choice.splits) return false;
    }
  }
  return true;
}
static_assert(valid(weight_gradient(1, 1, parts(16), 16)));
static_assert(valid(weight_gradient(3, 5, parts(24, 40), 72)));
static_assert(valid(weight_gradient(32, 8, parts(256, 192), 256)));
static_assert(valid(weight_gradient(256, 64, parts(128, 64), 64)));

// Only a few numbers of splits are tried, but no other number has a lower estimated time.
constexpr bool fastest(const Conv3x3WeightGradient& plan, int multiprocessors) {
  const int64_t pixels = plan.batch * plan.height * plan.width;
  for (int tile = 0; tile < kMultistageTileCount; ++tile) {
    const int64_t end = std::min(pixels / 128, 4 * multiprocessors / multistage_blocks(plan, tile));
    const double time = multistage_splits(plan, tile, multiprocessors, 528).time;
    for (int64_t splits = 1; splits <= end; ++splits) {
      if (multistage_time(plan, tile, multiprocessors, splits) < time) return false;
    }
  }
  return true;
}
static_assert(fastest(weight_gradient(32, 64, parts(64), 64), 108));
static_assert(fastest(weight_gradient(256, 32, parts(192, 128), 128), 132));
static_assert(fastest(weight_gradient(3, 40, parts(24, 40), 72), 46));
static_assert(fastest(weight_gradient(7, 13, parts(16), 16), 82));

// A linear layer of 192 channels has so few tiles that several blocks must share its pixels.
constexpr Conv3x3WeightGradient linear() {
  auto plan = weight_gradient(32, 16, {}, 576);
  plan.projected = parts(192);
  return plan;
}
static_assert(valid(linear()) && multistage_choice(linear(), 108, 528).splits > 4);
static_assert(multistage_choice(linear(), 108, 1).splits == 1);

}  // namespace
}  // namespace jaxunet::cuda
