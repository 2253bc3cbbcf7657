// Compile-time assertions about the choices of dispatch.h and tile.h for the shapes of the UNet,
// for test_tile_choices.py.

#include "common/kernel_set.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/phases.h"
#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda {
namespace {

constexpr float kSomewhere = 0;

// An H200, and the capabilities of it that each set of kernels may use.
constexpr Device kH200{132, 227 * 1024, true};
static_assert(limited(kH200, KernelSet::kFastest).hopper);
static_assert(!limited(kH200, KernelSet::kPortable).hopper &&
              !limited(kH200, KernelSet::kAda).hopper);
static_assert(limited(kH200, KernelSet::kPortable).smem_bytes == 227 * 1024 &&
              limited(kH200, KernelSet::kAda).smem_bytes == 99 * 1024);
static_assert(limited({82, 64 * 1024, false}, KernelSet::kAda).smem_bytes == 64 * 1024);

constexpr Conv3x3 convolution(int64_t channels, int64_t features, bool flipped, bool activation,
                              int64_t residual) {
  Conv3x3 plan{};
  plan.type = Type::kBfloat16;
  plan.batch = 32;
  plan.height = plan.width = 64;
  plan.features = features;
  plan.flipped = flipped;
  plan.x.count = 1;
  plan.x.channels[0] = plan.x.total = channels;
  plan.residual.count = residual > 0;
  plan.residual.channels[0] = plan.residual.total = residual;
  plan.y = {1, {}, {features}, features};
  if (activation) plan.a.data = plan.b.data = &kSomewhere;
  return plan;
}

constexpr Conv3x3WeightGradient weight_gradient(int64_t channels, int64_t features) {
  const Conv3x3 forward = convolution(channels, features, false, false, 0);
  Conv3x3WeightGradient plan{};
  plan.type = forward.type;
  plan.batch = forward.batch;
  plan.height = plan.width = forward.width;
  plan.features = features;
  plan.x = forward.x;
  return plan;
}

static_assert(forward_kernel(convolution(3, 64, false, false, 0), true) == Kernel::kFewChannels);
static_assert(forward_kernel(convolution(3, 64, true, false, 0), false) == Kernel::kFewChannels);
// More features without a shift than there are zeros to read.
static_assert(forward_kernel(convolution(3, 4104, true, false, 0), true) == Kernel::kImplicitGemm);
constexpr Conv3x3 shifted(Conv3x3 plan) {
  plan.shift.data = &kSomewhere;
  return plan;
}
static_assert(forward_kernel(shifted(convolution(3, 4104, true, false, 0)), true) ==
              Kernel::kFewChannels);
static_assert(forward_kernel(convolution(64, 3, false, true, 0), true) == Kernel::kFewFeatures);
static_assert(forward_kernel(convolution(64, 3, true, false, 0), false) == Kernel::kFewFeatures);
static_assert(forward_kernel(convolution(3, 64, false, false, 64), true) == Kernel::kImplicitGemm);
static_assert(forward_kernel(convolution(64, 64, false, true, 64), true) == Kernel::kHopper);
static_assert(forward_kernel(convolution(64, 64, false, true, 64), false) == Kernel::kImplicitGemm);
static_assert(forward_kernel(convolution(64, 64, false, true, 64),
                             limited(kH200, KernelSet::kPortable).hopper) == Kernel::kImplicitGemm);
// Float32 results: only the Hopper kernel writes them, even for few channels or features.
constexpr Conv3x3 wide(int64_t channels, int64_t features, bool activation = false) {
  Conv3x3 plan = convolution(channels, features, false, activation, 0);
  plan.wide = true;
  return plan;
}
static_assert(forward_kernel(wide(8, 8), true) == Kernel::kHopper);
static_assert(forward_kernel(wide(192, 8), true) == Kernel::kHopper);
static_assert(forward_kernel(wide(192, 3), true) == Kernel::kImplicitGemm);        // refused
static_assert(forward_kernel(wide(64, 64, true), true) == Kernel::kImplicitGemm);  // refused
static_assert(forward_kernel(wide(64, 64), false) == Kernel::kImplicitGemm);
static_assert(weight_gradient_kernel(weight_gradient(64, 64), false) == Kernel::kMultistage);
static_assert(weight_gradient_kernel(weight_gradient(3, 64), true) == Kernel::kFewChannels);
static_assert(weight_gradient_kernel(weight_gradient(64, 3), true) == Kernel::kFewFeatures);
static_assert(weight_gradient_kernel(weight_gradient(64, 64), true) == Kernel::kHopper);
static_assert(weight_gradient_kernel(weight_gradient(20, 3), true) == Kernel::kImplicitGemm);

// The gradient of a shortcut's input: 64 channels, projected to `first` + `second`.
constexpr Conv3x3 projection(int64_t first, int64_t second) {
  Conv3x3 plan = convolution(0, first + second, true, false, 0);
  plan.x = {};
  plan.projected = {1, {}, {64}, 64};
  plan.shortcut = &kSomewhere;
  plan.y = {2, {}, {first, second}, first + second};
  return plan;
}
static_assert(forward_kernel(projection(128, 64), true) == Kernel::kHopper &&
              in_one_launch(projection(128, 64), true));
static_assert(!in_one_launch(projection(128, 64), false) &&
              !in_one_launch(projection(72, 64), true));
static_assert(in_one_launch(projection(64, 72), true) && !in_one_launch(projection(64, 20), true));

// A linear layer never takes the kernels for few channels or features.
constexpr Conv3x3WeightGradient linear_weight_gradient(int64_t channels, int64_t features) {
  Conv3x3WeightGradient plan = weight_gradient(0, features);
  plan.x = {};
  plan.projected = {1, {}, {channels}, channels};
  return plan;
}
static_assert(forward_kernel(projection(8, 0), true) == Kernel::kHopper);
static_assert(weight_gradient_kernel(linear_weight_gradient(8, 8), true) == Kernel::kHopper);
static_assert(weight_gradient_kernel(linear_weight_gradient(8, 8), false) == Kernel::kMultistage);
static_assert(weight_gradient_kernel(linear_weight_gradient(8, 3), true) == Kernel::kImplicitGemm);

// At every tap, the accumulator columns that a packed strip keeps are the pixels under the tap, in
// the order of the box that is stored; and the last column is the last pixel of the box.
template <int samples>
constexpr bool keeps_pixels() {
  using Packed = TileTraits<4, 64, 1, 3, true, false, samples>;
  for (int tap = 0; tap < 9; ++tap) {
    for (int pixel = 0; pixel < Packed::kPixels; ++pixel) {
      const int sample = pixel % samples, column = pixel / samples % 4, row = pixel / samples / 4;
      const int read = Packed::tap_row(tap) + Packed::kept_group(pixel / 8) * 8 + pixel % 8;
      if (read != ((row + tap / 3) * 6 + column + tap % 3) * samples + sample) return false;
    }
  }
  return (Packed::tap_row(8) + Packed::kWgmmaN) * kRowBytes == Packed::kBoxBytes &&
         Packed::kTile.fits(4, 4) && !Packed::kTile.fits(4, 8);
}
static_assert(keeps_pixels<4>() && keeps_pixels<8>());

// The samples per strip of a convolution of 4 × 4 images on a GPU with 132 multiprocessors. The
// shapes of PACKED in parity_test.py must cover both packed tiles.
constexpr int samples_at_4x4(int64_t batch, int chunks, int shortcut_chunks, int64_t features) {
  return kTiles[quickest_tile(false, 132, batch, 4, 4, chunks, shortcut_chunks, features)].samples;
}
static_assert(samples_at_4x4(19, 2, 0, 520) == 4 && samples_at_4x4(59, 2, 3, 520) == 8);
static_assert(samples_at_4x4(59, 2, 0, 520) == 8);
// As docs/cuda.md says: up to one wave of tiles with one sample each, then packed tiles.
static_assert(samples_at_4x4(33, 4, 0, 256) == 1 && samples_at_4x4(34, 4, 0, 256) == 4);
static_assert(samples_at_4x4(256, 4, 0, 256) == 8);

// Each tap of a phase reads the pixels in the formula of `UpsampledConv3x3` (plan.h).
template <class Traits>
constexpr bool reads_taps() {
  for (int tap = 0; tap < 16; ++tap) {
    const int a = tap / 8, b = tap / 4 % 2, u = tap / 2 % 2, v = tap % 2;
    const int phase_row = (a * Traits::kHaloColumns + b) * Traits::kSamples;
    const int in_grid = Traits::kernel_tap(tap % 4);
    const auto row = [](int down, int right) {
      return (down * Traits::kHaloColumns + right) * Traits::kSamples;
    };
    if (Traits::tap_row(in_grid) + phase_row != row(u + a, v + b)) return false;
    if (Traits::tap_row(8 - in_grid) - phase_row != row(2 - u - a, 2 - v - b)) return false;
  }
  return true;
}
static_assert(reads_taps<WithPhases<TileTraits<16, 64, 2, 2, true, false, 1>>>());
static_assert(reads_taps<WithPhases<TileTraits<4, 64, 1, 2, true, false, 8>>>());

constexpr UpsampledConv3x3 upsampled(Type type, int64_t height, int64_t features) {
  UpsampledConv3x3 plan{};
  plan.type = type;
  plan.batch = 1;
  plan.height = height;
  plan.width = 4;
  plan.channels = 64;
  plan.features = features;
  return plan;
}
static_assert(takes_upsampled(upsampled(Type::kBfloat16, 4, 128), true));
static_assert(!takes_upsampled(upsampled(Type::kBfloat16, 4, 128), false));
static_assert(!takes_upsampled(upsampled(Type::kFloat32, 4, 128), true));
static_assert(!takes_upsampled(upsampled(Type::kBfloat16, 3, 128), true));
static_assert(!takes_upsampled(upsampled(Type::kBfloat16, 4, 72), true));

// The phase tiles chosen for the shapes of TILES in test_upsampled.py, which must cover all of
// them.
struct PhaseChoice {
  bool flipped;
  int tile;
  int64_t batch, height, width, channels, features;
};
constexpr PhaseChoice kPhaseChoices[] = {
    {false, 0, 17, 9, 13, 64, 64},  {false, 1, 3, 9, 13, 64, 192},  {false, 2, 1, 4, 4, 64, 64},
    {false, 3, 17, 6, 7, 64, 128},  {false, 4, 17, 6, 7, 64, 256},  {false, 5, 37, 6, 7, 64, 192},
    {false, 6, 7, 9, 13, 128, 192}, {false, 7, 9, 9, 13, 64, 256},  {false, 8, 67, 4, 4, 64, 128},
    {false, 9, 17, 4, 4, 64, 128},  {true, 0, 67, 9, 13, 64, 64},   {true, 1, 17, 9, 13, 64, 128},
    {true, 2, 1, 4, 4, 64, 64},     {true, 3, 67, 6, 7, 64, 128},   {true, 4, 67, 6, 7, 64, 256},
    {true, 5, 59, 9, 13, 64, 192},  {true, 6, 17, 12, 20, 64, 192}, {true, 7, 59, 9, 13, 64, 256},
    {true, 8, 259, 4, 4, 64, 256},  {true, 9, 67, 4, 4, 64, 128},
};
constexpr bool phase_choices_hold() {
  for (const PhaseChoice& c : kPhaseChoices) {
    if (quickest_phase_tile(132, c.flipped, c.batch, c.height, c.width, c.channels, c.features) !=
        c.tile)
      return false;
  }
  return true;
}
static_assert(phase_choices_hold());

// Runs blocks that draw tiles (forward_producer.cuh); those from block `begun` on start only when
// another has ended. True if every tile is computed once and the last draw sets the counter back.
constexpr bool draws_hold(int tiles, int blocks, int begun) {
  unsigned counter = 0;
  int computed[640] = {}, next[132] = {};
  const auto draw = [&] {  // atomicInc
    const unsigned drawn = counter;
    counter = drawn >= last_draw(tiles) ? 0 : drawn + 1;
    return drawn_tile(drawn, blocks);
  };
  for (int b = 0; b < blocks; ++b) next[b] = b;
  for (int ended = 0; ended < blocks;) {
    for (int b = 0; b < std::min(begun + ended, blocks); ++b) {
      if (next[b] >= tiles) continue;
      ++computed[next[b]];
      next[b] = draw();
      ended += next[b] >= tiles;
    }
  }
  for (int tile = 0; tile < tiles; ++tile) {
    if (computed[tile] != 1) return false;
  }
  return counter == 0;
}
static_assert(draws_hold(640, 132, 132) && draws_hold(640, 132, 108) && draws_hold(528, 132, 1) &&
              draws_hold(64, 16, 4) && draws_hold(4, 1, 1));

// On a GPU with 132 multiprocessors; first for images of 64×64 pixels.
constexpr bool draws(bool activated, int64_t batch, int height, int width, int chunks,
                     int64_t features) {
  const int tile = quickest_tile(activated, 132, batch, height, width, chunks, 0, features);
  return draws_tiles(Schedule(kTiles[tile], batch, height, width, chunks, 0, features).tiles, 132);
}
static_assert(!draws(false, 32, 64, 64, 1, 64) && draws(false, 64, 64, 64, 1, 64));
static_assert(draws(false, 32, 64, 64, 1, 128));
// The shapes of DRAWN in parity_test.py, with an activation and without, and flipped; and the one
// in test_upsampled.py.
static_assert(draws(false, 48, 64, 48, 1, 64) && draws(true, 48, 64, 48, 1, 64) &&
              draws(false, 480, 4, 4, 2, 520));
static_assert(
    draws_tiles(phase_schedule(kPhaseTiles[quickest_phase_tile(132, false, 40, 32, 32, 64, 64)],
                               false, 40, 32, 32, 64, 64)
                    .tiles,
                132));
static_assert(draws_tiles(528, 132) && !draws_tiles(527, 132) && !draws_tiles(1, 1));

}  // namespace
}  // namespace jaxunet::cuda
