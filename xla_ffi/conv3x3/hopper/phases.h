// Tiles of the Hopper convolution of upsampled images, which is computed by phases (plan.h).
//
// As in tile.h, a strip has a halo of one pixel; its pixels are those of the small image. Tap (u,
// v) of phase (a, b) reads the pixels under tap (u + a, v + b) of a 3 × 3 convolution; flipped, at
// tap (2 - u - a, 2 - v - b). The kernel has 16 taps, four for each phase.
//
// Each phase is an image of every second row and column of the large image, with a tensor map of
// its own. Forward, the phases are the parts of y: the output channels count the features of the
// four phases one after the other, and no tile crosses from one phase into the next. Flipped, the
// phases are the parts of x, so K runs over them.
#pragma once

#include "conv3x3/hopper/tile.h"

namespace jaxunet::cuda {

constexpr int kPhases = 4;

constexpr Tile phase_tile(int rows, int features, int consumers, int taps, bool transposed,
                          int samples) {
  return {rows, features, consumers, taps, transposed, false, samples, false, true};
}

// clang-format off: one tile a line
constexpr Tile kPhaseTiles[] = {
    //        rows, features, consumers, taps, transposed, samples
    phase_tile(16, 64, 2, 2, true, 1),
    phase_tile(16, 64, 1, 2, true, 1),
    phase_tile(8, 64, 1, 2, true, 1),
    phase_tile(8, 128, 1, 1, false, 1),
    phase_tile(8, 128, 2, 1, false, 1),
    phase_tile(8, 192, 2, 1, false, 1),
    phase_tile(8, 192, 1, 1, false, 1),
    phase_tile(8, 256, 2, 1, false, 1),
    phase_tile(4, 64, 1, 2, true, 8),
    phase_tile(4, 64, 1, 2, true, 4),
};
// clang-format on
constexpr int kPhaseTileCount = sizeof(kPhaseTiles) / sizeof(Tile);

// A tile's traits for the convolution by phases.
template <class Traits>
struct WithPhases : Traits {
  static_assert(!Traits::kActivated, "the activation comes before the upsampling");
  static constexpr bool kPhases = true;
  static constexpr Tile kTile = phase_tile(Traits::kRows, Traits::kFeatures, Traits::kConsumers,
                                           Traits::kTaps, Traits::kTransposed, Traits::kSamples);
  static constexpr int kKernelTaps = kTile.kernel_taps();
  static_assert(kKernelTaps % Traits::kTaps == 0, "a stage has taps of one phase");
  JAXUNET_HOST_DEVICE static constexpr int kernel_tap(int n) { return n / 2 * 3 + n % 2; }
};

// The work of one shape: `channels` and `features` as in UpsampledConv3x3.
constexpr Schedule phase_schedule(const Tile& tile, bool flipped, int64_t batch, int64_t height,
                                  int64_t width, int64_t channels, int64_t features) {
  const int chunks = static_cast<int>(channels / kChunk);
  return {tile,
          batch,
          height,
          width,
          flipped ? kPhases * chunks : chunks,
          0,
          flipped ? features : kPhases * features};
}

// The index of the tile of kPhaseTiles with the fewest estimated cycles.
constexpr int quickest_phase_tile(int multiprocessors, bool flipped, int64_t batch, int64_t height,
                                  int64_t width, int64_t channels, int64_t features) {
  const auto takes = [=](const Tile& tile) { return flipped || features % tile.features == 0; };
  const Schedule all =
      phase_schedule(kPhaseTiles[0], flipped, batch, height, width, channels, features);
  return quickest_of(kPhaseTiles, takes, multiprocessors, batch, height, width, all.chunks, 0,
                     flipped ? features : kPhases * features);
}

}  // namespace jaxunet::cuda
