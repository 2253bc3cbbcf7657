// Tiles of the Hopper forward convolution: the list of tiles that kernels are compiled for, and the
// choice among them. Plain arithmetic, shared by the host, the kernel and tile_choices_test.cc.
//
// An image is cut into strips of 8 columns × `rows` rows, which are loaded with a halo of one
// pixel. A block computes one output tile at a time: one strip for each consumer warpgroup ×
// `features` output channels. The mainloop runs over the input in chunks of 64 channels, nine taps
// each, then over the chunks of a shortcut's input (`projected`), centre tap only.
//
// A strip of a 4 × 4 image would be mostly empty, so a packed strip holds 4 or 8 whole images, the
// samples of a pixel side by side: in shared memory, pixel (row, column) of sample n is row (row ·
// 6 + column) · samples + n, halo included. The pixels that one tap reads are then contiguous
// except for the two halo columns between image rows. The product includes those columns: it
// computes 22 positions (3 rows of 6 columns, and 4 of the last) and keeps 16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "common/integers.h"

namespace jaxunet::cuda {

constexpr int kChunk = 64;             // channels of a chunk
constexpr int kRowBytes = 2 * kChunk;  // one pixel's chunk: a swizzled row of shared memory
constexpr int kStripColumns = 8;       // pixels
constexpr int kHaloColumns = kStripColumns + 2;
constexpr int kStripStages = 2;              // strips in flight for each consumer
constexpr int kMaxSharedBytes = 227 * 1024;  // limit per block, compute capability 9.0
constexpr int kBarrierBytes = 1024;          // reserved for all barriers of a block
constexpr int kMaxWeightStages = 16;         // limit of the weight ring
constexpr int kWarpgroup = 128;              // threads per warpgroup

// The shape of an output tile, and of the block that computes it. forward.cuh shows the block.
struct Tile {
  int rows;       // image rows per strip
  int features;   // output channels
  int consumers;  // consumer warpgroups, one strip each
  int taps;       // kernel taps per stage of the weight ring: 1 or 3; with phases 1 or 2
  // Computes (features, pixels) instead of (pixels, features). M of wgmma is 64: a transposed tile
  // has 64 features, and the pixels of its strip are N; in any other tile a strip has 64 pixels.
  // For 64 features, transposing reduces shared-memory traffic.
  bool transposed;
  bool activated;       // an extra warpgroup per consumer applies SiLU(a · x + b) to its strips
  int samples = 1;      // images per strip; more than one: packed
  bool wide = false;    // uses wide_epilogue.cuh
  bool phases = false;  // convolves by phases (phases.h)

  constexpr int kernel_taps() const { return phases ? 4 : 9; }
  constexpr bool packed() const { return samples > 1; }
  constexpr bool fits(int64_t height, int64_t width) const {
    return !packed() || (height == rows && width == strip_columns());
  }
  constexpr int strip_columns() const { return packed() ? rows : kStripColumns; }
  constexpr int halo_columns() const { return strip_columns() + 2; }
  constexpr int pixels() const { return rows * strip_columns() * samples; }  // of all samples
  // The TMA box of a strip: the strip and one pixel around it.
  constexpr int box_bytes() const { return (rows + 2) * halo_columns() * samples * kRowBytes; }
  // The box rounded up to a multiple of 1024 bytes, the period of the swizzle pattern.
  constexpr int strip_bytes() const {
    return packed() ? box_bytes() : (rows + 2 + 3) / 4 * 4 * halo_columns() * kRowBytes;
  }
  // Distance between the groups of eight pixels that wgmma reads, in rows of shared memory
  // (pixels).
  constexpr int group_stride_rows() const { return packed() ? 8 : halo_columns(); }
  // One stage of weights: 64 channels of `taps` taps.
  constexpr int stage_bytes() const { return taps * features * kRowBytes; }
  // The output buffer; none for float32 results, which are stored from registers.
  constexpr int output_bytes() const { return wide ? 0 : pixels() * features * 2; }
  constexpr int warpgroups() const { return consumers + 1 + (activated ? consumers : 0); }
  constexpr int threads() const { return kWarpgroup * warpgroups(); }
  // N of wgmma; M is 64.
  constexpr int wgmma_n() const {
    return packed()     ? ((rows - 1) * halo_columns() + strip_columns()) * samples
           : transposed ? pixels()
                        : features;
  }
  // Groups of eight accumulator columns that are outputs, not halo.
  constexpr int kept_groups() const { return packed() ? pixels() / 8 : wgmma_n() / 8; }
  // Shared memory other than the weight ring, and the number of weight stages that fit in the rest.
  constexpr int fixed_bytes() const {
    return consumers * (kStripStages * strip_bytes() + output_bytes()) + kBarrierBytes;
  }
  constexpr int max_stages() const {
    return std::min((kMaxSharedBytes - fixed_bytes()) / stage_bytes(), kMaxWeightStages);
  }
  // Registers per thread at launch: a multiprocessor has 65536, allocated in multiples of eight, at
  // most 255 per thread. setmaxnreg then moves the registers that the producer and the activation
  // warpgroups do not need to the consumers.
  constexpr int launch_registers() const { return std::min(65536 / threads() / 8 * 8, 248); }
  constexpr int producer_registers() const { return 40; }
  constexpr int activation_registers() const { return 80; }
  constexpr int consumer_registers() const {
    const int spare = warpgroups() * launch_registers() - producer_registers() -
                      (activated ? consumers * activation_registers() : 0);
    return std::min(spare / consumers / 8 * 8, 232);
  }
};

// A tile as compile-time constants.
template <int rows, int features, int consumers, int taps, bool transposed, bool activated,
          int samples>
struct TileTraits {
  static constexpr Tile kTile{rows, features, consumers, taps, transposed, activated, samples};
  static constexpr int kRows = rows, kFeatures = features, kConsumers = consumers, kTaps = taps,
                       kSamples = samples;
  static constexpr bool kTransposed = transposed, kActivated = activated, kPacked = kTile.packed(),
                        kWide = false, kPhases = false;
  static constexpr int kKernelTaps = kTile.kernel_taps();
  static constexpr int kPixels = kTile.pixels(), kWgmmaN = kTile.wgmma_n(),
                       kKeptGroups = kTile.kept_groups();
  static constexpr int kStripColumns = kTile.strip_columns(), kHaloColumns = kTile.halo_columns(),
                       kGroupStrideRows = kTile.group_stride_rows();
  static constexpr int kStripBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes(),
                       kStageBytes = kTile.stage_bytes(), kOutputBytes = kTile.output_bytes();
  static constexpr int kWarpgroups = kTile.warpgroups(), kThreads = kTile.threads();
  static constexpr int kConsumerRegisters = kTile.consumer_registers(),
                       kProducerRegisters = kTile.producer_registers(),
                       kActivationRegisters = kTile.activation_registers();
  static_assert(features % kChunk == 0 && (transposed ? features : kPixels) == 64,
                "M of wgmma is 64");
  static_assert(samples == 1 || (transposed && !activated),
                "a packed strip is the right operand of the product");
  static_assert(kStripBytes % 1024 == 0 && kBoxBytes <= kStripBytes,
                "the swizzle pattern repeats every 1024 bytes");
  static_assert(kTile.max_stages() >= 2, "a stage is released only when the next one is in use");

  // The first pixel that a tap (0 to 8, row-major) reads, as a row of the haloed strip in shared
  // memory.
  JAXUNET_HOST_DEVICE static constexpr int tap_row(int tap) {
    return (tap / 3 * kHaloColumns + tap % 3) * samples;
  }
  // The index among the 3 × 3 taps of the kernel's `n`-th tap.
  JAXUNET_HOST_DEVICE static constexpr int kernel_tap(int n) { return n; }
  // The `n`-th kept group of eight accumulator columns.
  JAXUNET_HOST_DEVICE static constexpr int kept_group(int n) {
    constexpr int in_row = kStripColumns * samples / 8, row_stride = kHaloColumns * samples / 8;
    return kPacked ? n / in_row * row_stride + n % in_row : n;
  }
};

// The same tile with wide_epilogue.cuh, without an activation.
template <class Traits>
struct WithWideResults : Traits {
  static_assert(!Traits::kActivated, "the terms of a float32 image are taken after its activation");
  static constexpr bool kWide = true;
  static constexpr Tile kTile{
      Traits::kRows,       Traits::kFeatures,  Traits::kConsumers, Traits::kTaps,
      Traits::kTransposed, Traits::kActivated, Traits::kSamples,   kWide};
  static constexpr int kOutputBytes = kTile.output_bytes();
};

// Constants of `Schedule::cycles`, fitted to times on an H200. To refit: force each tile in turn
// (`hopper_forward` in forward.cu), time the cases of the benchmark's kernels, and minimize the
// squared relative error of the estimate over all pairs of a case and a tile.
namespace fit {
// Achieved fraction of wgmma's peak rate.
constexpr double kTensorCoreRate = 0.89;
// Measured time to read the operands of a wgmma, relative to 16 + n / 4 cycles.
constexpr double kOperandReadSlowdown = 1.15;
// Elements that one activation warpgroup processes per cycle.
constexpr double kActivatedPerCycle = 2.8;
// Cycles that a projected chunk takes in addition to its wgmmas, because a single tap does not hide
// the loads.
constexpr double kShortcutChunkCycles = 500;
// Cycles at the end of a tile: to drain the pipeline (shared by the consumers), and to write
// `kEpilogueOutputs` outputs of a strip.
constexpr double kDrainCycles = 440, kEpilogueCycles = 1270;
constexpr int kEpilogueOutputs = 8192;
}  // namespace fit

// A tile applied to one shape: the output tiles to distribute among the blocks, and the weight
// ring.
struct Schedule {
  int batch = 0, height = 0, width = 0;
  int chunks = 0, shortcut_chunks = 0;     // 64-channel chunks of x, and of `projected`
  int strips_down = 0, strips_across = 0;  // per image
  int strips = 0, feature_tiles = 0;       // in the batch; in all output channels
  int tiles = 0;                           // strips / consumers × feature_tiles
  int stages = 0;                          // stages of the weight ring
  bool weights_resident = false;           // the ring holds all weights; they are loaded once

  Schedule() = default;
  constexpr Schedule(const Tile& tile, int64_t batch_, int64_t height_, int64_t width_, int chunks_,
                     int shortcut_chunks_, int64_t features)
      : batch(static_cast<int>(batch_)),
        height(static_cast<int>(height_)),
        width(static_cast<int>(width_)),
        chunks(chunks_),
        shortcut_chunks(shortcut_chunks_) {
    strips_down = static_cast<int>(ceil_div(height_, tile.rows));
    strips_across = static_cast<int>(ceil_div(width_, tile.strip_columns()));
    strips = static_cast<int>(ceil_div(batch_, tile.samples)) * strips_down * strips_across;
    feature_tiles = static_cast<int>(ceil_div(features, tile.features));
    tiles = static_cast<int>(ceil_div(strips, tile.consumers)) * feature_tiles;
    // The stages of weights that one tile reads.
    const int loads = chunks * tile.kernel_taps() / tile.taps + shortcut_chunks;
    weights_resident = feature_tiles == 1 && loads <= tile.max_stages();
    // At most six stages. To refit: time the kernels with other limits.
    stages = weights_resident ? loads : std::min(tile.max_stages(), 6);
  }

  int shared_bytes(const Tile& tile) const {
    return tile.fixed_bytes() + stages * tile.stage_bytes();
  }

  // Estimated cycles of the block that runs longest. A wgmma of 64 × n outputs takes n / 2 cycles
  // on the tensor cores and about 16 + n / 4 to read its operands; one tap of a chunk is four
  // wgmmas.
  constexpr double cycles(const Tile& tile, int multiprocessors) const {
    const double n = tile.wgmma_n();
    const double tap = 4 / fit::kTensorCoreRate * tile.consumers *
                       std::max(n / 2, fit::kOperandReadSlowdown * (16 + n / 4));
    const double activation =
        tile.activated ? (tile.rows + 2) * kHaloColumns * kChunk / fit::kActivatedPerCycle : 0;
    const double mainloop = chunks * std::max(tile.kernel_taps() * tap, activation) +
                            shortcut_chunks * (tap + fit::kShortcutChunkCycles);
    const double epilogue = fit::kDrainCycles / tile.consumers + fit::kEpilogueCycles *
                                                                     tile.pixels() * tile.features /
                                                                     fit::kEpilogueOutputs;
    return static_cast<double>(ceil_div(tiles, multiprocessors)) * (mainloop + epilogue);
  }
};

// The tiles that kernels are compiled for. For 4 × 4 images, a separate kernel applies the
// activation. Strips of four such images serve batches for which strips of eight would leave
// multiprocessors idle.
// clang-format off: one tile a line
constexpr Tile kTiles[] = {
    // rows, features, consumers, taps, transposed, activated, samples
    {16, 64, 2, 3, true, false, 1},
    {16, 64, 1, 3, true, false, 1},
    {8, 64, 1, 3, true, false, 1},
    {8, 128, 1, 1, false, false, 1},
    {8, 128, 2, 1, false, false, 1},
    {8, 192, 2, 1, false, false, 1},
    {8, 192, 1, 1, false, false, 1},
    {8, 256, 2, 1, false, false, 1},
    {16, 64, 2, 3, true, true, 1},
    {8, 64, 2, 3, true, true, 1},
    {4, 64, 1, 3, true, false, 8},
    {4, 64, 1, 3, true, false, 4},
};
// clang-format on
constexpr int kTileCount = sizeof(kTiles) / sizeof(Tile);

// The index of the tile with the fewest estimated cycles among those that `takes` accepts. The
// other arguments are those of `Schedule`.
template <int kCount, class Takes>
constexpr int quickest_of(const Tile (&tiles)[kCount], const Takes& takes, int multiprocessors,
                          int64_t batch, int64_t height, int64_t width, int chunks,
                          int shortcut_chunks, int64_t features) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < kCount; ++i) {
    const Tile& tile = tiles[i];
    if (!takes(tile) || !tile.fits(height, width)) continue;
    const Schedule schedule(tile, batch, height, width, chunks, shortcut_chunks, features);
    const double cycles = schedule.cycles(tile, multiprocessors);
    if (best >= 0 && cycles >= least) continue;
    best = i;
    least = cycles;
  }
  return best;
}

// The index of a tile of kTiles.
constexpr int quickest_tile(bool activated, int multiprocessors, int64_t batch, int64_t height,
                            int64_t width, int chunks, int shortcut_chunks, int64_t features) {
  const auto takes = [=](const Tile& tile) { return tile.activated == activated; };
  return quickest_of(kTiles, takes, multiprocessors, batch, height, width, chunks, shortcut_chunks,
                     features);
}

// True if the blocks of a launch draw their tiles from a counter (forward.cuh). With fewer tiles
// per block, draws make some launches slower on a GPU that runs nothing else. To refit: time both
// ways (tests/gpu/harness/conv/held.cu).
constexpr bool draws_tiles(int tiles, int blocks) { return tiles >= 4 * blocks; }

// The first tile of a block has the number of the block, and the draws give the tiles after these.
// With each of its tiles, a block draws the next one, so a launch has one draw for each tile.
JAXUNET_HOST_DEVICE constexpr int drawn_tile(unsigned draw, int blocks) {
  return blocks + static_cast<int>(draw);
}
JAXUNET_HOST_DEVICE constexpr unsigned last_draw(int tiles) {
  return static_cast<unsigned>(tiles - 1);
}

// The first pixel of a strip, without its halo. A strip past the last, and the samples of a packed
// strip past the last sample, lie outside of the images: TMA reads zeros there and stores nothing.
struct Strip {
  int sample, row, column;
};

}  // namespace jaxunet::cuda
