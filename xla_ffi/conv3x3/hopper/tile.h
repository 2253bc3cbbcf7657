// How Hopper's forward convolution is cut up: numbers shared by the host, the kernel and the tests.
//
// An image is cut into strips of 8 columns × `rows` rows. A block of threads computes one tile at a time: `groups`
// strips, one for each computing warpgroup, × `features` output channels. It walks through the input in chunks of 64
// channels, nine taps each, then through what a shortcut projects, centre tap only.
//
// Images of 4 × 4 would leave most of a strip empty. A packed strip is of the whole images of 4 or 8 samples, the
// samples of a pixel side by side: in shared memory pixel (row, column) of its sample n is row (row · 6 + column) ·
// samples + n, halo included. A tap's pixels then begin at a distance of its own and lie in line, rows of 4 apart by 2
// of halo; the product runs through those as well, 22 positions of which 16 are kept.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace jaxunet::cuda {

constexpr int kChunk = 64;  // channels of a chunk: a row of 128 bytes
constexpr int kStripColumns = 8;
constexpr int kHaloColumns = kStripColumns + 2;
constexpr int kRowBytes = 2 * kChunk;
constexpr int kSlots = 2;  // strips in flight for each computing warpgroup
constexpr int kSharedBytes = 227 * 1024;
constexpr int kBarrierBytes = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Tile {
  int rows;         // image rows of a strip
  int features;     // output channels
  int groups;       // computing warpgroups
  int taps;         // of one stage of the weight ring: 1 or 3
  bool transposed;  // the product is (features, pixels), not (pixels, features): less shared-memory traffic where
                    // features = 64
  bool activated;   // as many warpgroups more apply a · x + b and SiLU
  int samples = 1;  // of a strip; more: packed

  constexpr bool packed() const { return samples > 1; }
  constexpr bool fits(int64_t height, int64_t width) const {
    return !packed() || (height == rows && width == strip_columns());
  }
  constexpr int strip_columns() const { return packed() ? rows : kStripColumns; }
  constexpr int halo_columns() const { return strip_columns() + 2; }
  constexpr int pixels() const { return rows * strip_columns() * samples; }  // of all samples
  // Of a slot: the strip with one pixel around it, rounded up to whole 1024 bytes.
  constexpr int strip_bytes() const {
    return packed() ? box_bytes() : (rows + 2 + 3) / 4 * 4 * halo_columns() * kRowBytes;
  }
  constexpr int box_bytes() const { return (rows + 2) * halo_columns() * samples * kRowBytes; }
  // From a haloed strip's eight pixels to the next, in rows of 128 bytes.
  constexpr int rows_of_eight() const { return packed() ? 8 : halo_columns(); }
  constexpr int stage_bytes() const { return taps * features * kRowBytes; }
  constexpr int staged_bytes() const { return pixels() * features * 2; }
  constexpr int warpgroups() const { return groups + 1 + (activated ? groups : 0); }
  constexpr int threads() const { return 128 * warpgroups(); }
  // N of wgmma; its M is 64.
  constexpr int columns() const {
    return packed() ? ((rows - 1) * halo_columns() + strip_columns()) * samples : transposed ? pixels() : features;
  }
  // Eights of columns without those that are halo.
  constexpr int kept_eights() const { return packed() ? pixels() / 8 : columns() / 8; }
  constexpr int fixed_bytes() const { return groups * (kSlots * strip_bytes() + staged_bytes()) + kBarrierBytes; }
  constexpr int stages_that_fit() const { return std::min((kSharedBytes - fixed_bytes()) / stage_bytes(), 16); }
  // Registers a thread: at launch, and after the warpgroups have shared them out.
  constexpr int launch_registers() const { return std::min(65536 / threads() / 8 * 8, 248); }
  constexpr int loading_registers() const { return 40; }
  constexpr int activating_registers() const { return 80; }
  constexpr int computing_registers() const {
    const int spare =
        warpgroups() * launch_registers() - loading_registers() - (activated ? groups * activating_registers() : 0);
    return std::min(spare / groups / 8 * 8, 232);
  }
};

// A tile that a kernel is compiled for.
template <int rows, int features, int groups, int taps, bool transposed, bool activated, int samples>
struct Cut {
  static constexpr Tile kTile{rows, features, groups, taps, transposed, activated, samples};
  static constexpr int kRows = rows, kFeatures = features, kGroups = groups, kTaps = taps, kSamples = samples;
  static constexpr bool kTransposed = transposed, kActivated = activated;
  static constexpr int kPixels = kTile.pixels(), kColumns = kTile.columns(), kKeptEights = kTile.kept_eights();
  static constexpr int kStripColumns = kTile.strip_columns(), kHaloColumns = kTile.halo_columns(),
                       kRowsOfEight = kTile.rows_of_eight();
  static constexpr bool kPacked = kTile.packed();
  static constexpr int kStripBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes(),
                       kStageBytes = kTile.stage_bytes(), kStagedBytes = kTile.staged_bytes();
  static constexpr int kWarpgroups = kTile.warpgroups(), kThreads = kTile.threads();
  static constexpr int kComputingRegisters = kTile.computing_registers(), kLoadingRegisters = kTile.loading_registers(),
                       kActivatingRegisters = kTile.activating_registers();
  static_assert(features % kChunk == 0 && (transposed ? features : kPixels) == 64, "M of wgmma is 64");
  static_assert(samples == 1 || (transposed && !activated), "a packed strip is the product's right operand");
  static_assert(kStripBytes % 1024 == 0 && kBoxBytes <= kStripBytes, "where the swizzle begins again");
  static_assert(kTile.stages_that_fit() >= 2, "a stage is released once the next is in use");

  // Where a tap's first pixel lies in a haloed strip, in rows of 128 bytes.
  JAXUNET_HOST_DEVICE static constexpr int tap_row(int tap) { return (tap / 3 * kHaloColumns + tap % 3) * samples; }
  // Of the product's eights of columns the `n`-th that is kept.
  JAXUNET_HOST_DEVICE static constexpr int kept_eight(int n) {
    constexpr int in_row = kStripColumns * samples / 8, on = kHaloColumns * samples / 8;
    return kPacked ? n / in_row * on + n % in_row : n;
  }
};

// A tile applied to one shape.
struct Schedule {
  int batch = 0, height = 0, width = 0, chunks = 0, extras = 0;
  int strips_down = 0, strips_across = 0, strips = 0, feature_tiles = 0, tiles = 0;
  int stages = 0;         // of the weight ring
  bool resident = false;  // the ring holds all weights, which are loaded once

  Schedule() = default;
  constexpr Schedule(const Tile& tile, int64_t batch_, int64_t height_, int64_t width_, int chunks_, int extras_,
                     int64_t features)
      : batch(static_cast<int>(batch_)),
        height(static_cast<int>(height_)),
        width(static_cast<int>(width_)),
        chunks(chunks_),
        extras(extras_) {
    strips_down = static_cast<int>(ceil_div(height_, tile.rows));
    strips_across = static_cast<int>(ceil_div(width_, tile.strip_columns()));
    strips = static_cast<int>(ceil_div(batch_, tile.samples)) * strips_down * strips_across;
    feature_tiles = static_cast<int>(ceil_div(features, tile.features));
    tiles = static_cast<int>(ceil_div(strips, tile.groups)) * feature_tiles;
    const int loads = chunks * 9 / tile.taps + extras;
    resident = feature_tiles == 1 && loads <= tile.stages_that_fit();
    stages = resident ? loads : std::min(tile.stages_that_fit(), 6);
  }

  int shared_bytes(const Tile& tile) const { return tile.fixed_bytes() + stages * tile.stage_bytes(); }

  // Estimated cycles of the longest-running block: a fit to measurements on an H200, of the Pallas kernel of the same
  // design. A wgmma of 64 × n outputs takes n / 2 cycles on the tensor cores and about 16 + n / 4 to read its operands.
  constexpr double cycles(const Tile& tile, int multiprocessors) const {
    const double n = tile.columns(), block = 4 / 0.89 * tile.groups * std::max(n / 2, 1.15 * (16 + n / 4));
    const double activation = tile.activated ? (tile.rows + 2) * kHaloColumns * kChunk / 2.8 : 0;
    const double steps = chunks * std::max(9 * block, activation) + extras * (block + 500);
    const double drain = 440.0 / tile.groups + 1270.0 * tile.pixels() * tile.features / 8192;
    return static_cast<double>(ceil_div(tiles, multiprocessors)) * (steps + drain);
  }
};

// The tiles that kernels are compiled for. The activation of images of 4 × 4 is a kernel of its own; they are packed by
// four samples where eight would leave multiprocessors without a tile.
constexpr Tile kTiles[] = {
    // rows, features, groups, taps, transposed, activated, samples
    {16, 64, 2, 3, true, false},  {16, 64, 1, 3, true, false},   {8, 64, 1, 3, true, false},
    {8, 128, 1, 1, false, false}, {8, 128, 2, 1, false, false},  {8, 192, 2, 1, false, false},
    {8, 192, 1, 1, false, false}, {8, 256, 2, 1, false, false},  {16, 64, 2, 3, true, true},
    {8, 64, 2, 3, true, true},    {4, 64, 1, 3, true, false, 8}, {4, 64, 1, 3, true, false, 4},
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(Tile);

// The number of the tile of the least estimated cycles; the shape is given as to `Schedule`.
constexpr int quickest_tile(bool activated, int multiprocessors, int64_t batch, int64_t height, int64_t width,
                            int chunks, int extras, int64_t features) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < kTileCount; ++i) {
    const Tile& tile = kTiles[i];
    if (tile.activated != activated || !tile.fits(height, width)) continue;
    const double cycles = Schedule(tile, batch, height, width, chunks, extras, features).cycles(tile, multiprocessors);
    if (best >= 0 && cycles >= least) continue;
    best = i;
    least = cycles;
  }
  return best;
}

struct Strip {
  int sample, row, column;  // of its first pixel; a strip past the last lies in no sample: it reads zeros, and nothing
                            // of it is stored; nor are the samples past the last in a packed one
};

}  // namespace jaxunet::cuda
