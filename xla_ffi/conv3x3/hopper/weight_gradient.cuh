// Weight gradient of the 3×3 convolution on Hopper: dW[i, j, c, f] = sum over pixels of act(x) shifted by (i - 1, j -
// 1), times dy.
//
// A block owns 64 input × 64 output channels, all nine taps (147 KB of float32, in registers), and a share of the
// pixels. A warpgroup copies strips of 8 × 8 pixels into a ring in shared memory: dy, and x with one pixel of halo.
// Both operands of wgmma are read across K: channels are contiguous and the pixels are K. Three warpgroups own a row of
// taps each: tap (i, j) is the haloed x at a shifted address, and as the distance between two 64-channel columns of the
// right operand is free, it is set to one pixel: one wgmma of 64 × 192 multiplies dy by the three taps of a row at
// once. Three warps beside the one that copies apply the activation, where there is one, to x in place; and they sum
// dy, which is at hand: the blocks of one split and the same output channels take turns at its samples.
//
// Of images of four rows a strip has those of two samples, one below the other: dy's 2 · 4 × 8 pixels, and x's 2 · 6 ×
// 10. Of images of 4 × 4 it has those of four, packed (hopper_tile.h): dy's 4 × 4 · 4 pixels, of which 16 steps of K
// are an image row, and x's 6 × 6 · 4.
//
// A shortcut's gradient, of what it projects times dy, comes from further blocks of the same launch: what they read is
// on its way while the others multiply. Such a block owns up to six projected chunks of 64 channels, two for each
// warpgroup, × 64 output channels: dy is read once for all of them. In a linear layer they are all there is, and sum
// dy.
//
// The shares' sums are added afterwards, in order: no atomics, the same bits in every run. Where only that addition
// reads them they lie as the registers held them (tile_of_sums.h), or their stores would take longer than a strip.

#pragma once

#include "conv3x3/hopper/activation.cuh"
#include "common/tma.cuh"
#include "conv3x3/hopper/strip.cuh"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/hopper/weight_gradient_parameters.cuh"
#include "conv3x3/accumulator_tile.h"
#include "common/wgmma.cuh"

namespace jaxunet::cuda::weight_gradient {

constexpr int kRows = 8, kTapRows = 3, kStages = 8;
constexpr Tile kStrip{kRows, 0, 1, 1, false, false}, kPackedStrip{4, 0, 1, 1, true, false, 4};
constexpr int kDyBytes = kRows * kStripColumns * kRowBytes;
constexpr int kPaired = 2, kPackedSamples = kPackedStrip.samples;  // of a strip, of images of few rows; of 4 × 4
static_assert(kPaired * (kRows / kPaired + 2) * kHaloColumns * kRowBytes <= kStrip.strip_bytes());
static_assert(kPackedStrip.pixels() == kStrip.pixels() && kPackedStrip.strip_columns() * kPackedSamples == 16);
constexpr int kHelpers = 96, kHelperPixels = kHelpers / 8;  // the threads of three warps; eight of them read a pixel
constexpr int kPair = 2, kMostChunks = kPair * kTapRows;    // of a warpgroup and a block of the shortcut's gradient

constexpr int kThreads = 128 * (kTapRows + 1);
// Registers a thread, of the 4 · 128 that a multiprocessor has for the four warpgroups.
template <bool kActivated>
constexpr int kComputingRegisters = kActivated ? 136 : 152;
template <bool kActivated>
constexpr int kHelpingRegisters = kActivated ? 104 : 56;

template <class T, bool kPacked>
struct Block {
  static constexpr Tile kTile = kPacked ? kPackedStrip : kStrip;
  static constexpr int kXBytes = kTile.strip_bytes(), kBoxBytes = kTile.box_bytes();
  static constexpr int kRingBytes = kStages * (kXBytes + kDyBytes);
  static constexpr int kBytes = kRingBytes + kBarrierBytes + kHelperPixels * kChunk * 4;
  static_assert(kBytes <= kSharedBytes && kXBytes % 1024 == 0);
  static_assert(3 * (1 + kMostChunks) * kDyBytes <= kRingBytes,
                "one stage in use, one not yet released, one being filled");
  // Bytes from a haloed pixel to that on its right, to the next eight steps of K, and to the pixel below.
  static constexpr int kRight = kTile.samples * kRowBytes, kEight = kTile.rows_of_eight() * kRowBytes,
                       kBelow = kTile.halo_columns() * kRight;
  static constexpr int kRowsOfStep = kPacked ? 1 : 2;  // image rows of 16 steps of K

  const Parameters& p;
  unsigned char *x, *dy;
  Barrier *full, *ready, *empty;
  float* scratch;  // (kHelperPixels, 64)
  int split, tile, x_block, feature;
  int first, count;  // strips
  int chunks;        // projected; 0: a block of the kernel's gradient
  int x_blocks;      // that take turns at the samples whose dy they sum
  bool sums_dy;

  __device__ Block(const Parameters& parameters, unsigned char* shared) : p(parameters) {
    x = shared;
    dy = x + kStages * kXBytes;
    full = reinterpret_cast<Barrier*>(dy + kStages * kDyBytes);
    ready = full + kStages;
    empty = ready + kStages;
    scratch = reinterpret_cast<float*>(dy + kStages * kDyBytes + kBarrierBytes);
    // Neighbours share the pixels, which then come from L2.
    const int kernel_blocks = p.kernel.blocks(), index = static_cast<int>(blockIdx.x);
    const bool projected = index >= kernel_blocks;
    const int at = projected ? index - kernel_blocks : index;
    const Work& work = projected ? p.shortcut : p.kernel;
    split = work.by_tiles.quotient(at);
    tile = at - split * work.tiles;
    x_block = p.feature_blocks.quotient(tile);
    feature = (tile - x_block * static_cast<int>(p.feature_blocks.by)) * kChunk;
    first = work.first(split);
    count = work.count(split);
    const int rest = p.shortcut_chunks - x_block * p.block_chunks;
    chunks = projected ? (rest < p.block_chunks ? rest : p.block_chunks) : 0;
    // Of the samples that this split meets, is there one whose dy is to be summed here?
    x_blocks = static_cast<int>(p.x_blocks.by);
    const int met = p.strips_of_sample.quotient(first), ahead = x_block - turn_of(met);
    const int own = met + (ahead < 0 ? ahead + x_blocks : ahead);
    sums_dy = (!projected || p.kernel.tiles == 0) && x_block < x_blocks &&
              own * static_cast<int>(p.strips_of_sample.by) < first + count;
  }

  // The x_block whose blocks sum the dy of a sample.
  __device__ int turn_of(int sample) const { return sample - p.x_blocks.quotient(sample) * x_blocks; }

  // The ring of a block of the shortcut's gradient: dy, then the chunks, as boxes of one size.
  __device__ int stage_bytes() const { return (1 + chunks) * kDyBytes; }
  __device__ int stages() const {
    const int fit = kRingBytes / stage_bytes();
    return fit < kStages ? fit : kStages;
  }

  // The copy engine reads its maps before its first copies.
  __device__ void prefetch() const {
    const Image& image = chunks ? p.projected : p.x;
    prefetch_map(&p.dy);
    prefetch_map(&image.maps[Place(image, chunks ? x_block * p.block_chunks : x_block).part]);
  }

  __device__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      ready[i].init(kHelpers);
      // One for each warp that takes from a stage: of all warpgroups, or of those that have chunks.
      empty[i].init(4 * (chunks ? (chunks + kPair - 1) / kPair : kTapRows) + (sums_dy ? kHelpers / 32 : 0));
    }
  }

  // Its sample is the first of the strip's, counted in strips' samples.
  __device__ Strip strip_at(int strip) const {
    const int sample = p.strips_of_sample.quotient(strip);
    const int rest = strip - sample * static_cast<int>(p.strips_of_sample.by), down = p.strips_across.quotient(rest);
    return {sample, down * kRows, (rest - down * static_cast<int>(p.strips_across.by)) * kStripColumns};
  }

  // What a strip is copied by, whose sample is counted as the images' are.
  __device__ Strip images(const Strip& at) const { return {at.sample * p.samples, at.row, at.column}; }

  // The one after it: without a division.
  __device__ void step(Strip& at) const {
    if ((at.column += kStripColumns) < p.width) return;
    at.column = 0;
    if ((at.row += kRows) < p.height) return;
    at.row = 0;
    ++at.sample;
  }

  __device__ void load() const {
    const Place place(p.x, x_block);
    const int bytes = (kPacked ? kBoxBytes : (kRows + 2 * p.samples) * kHaloColumns * kRowBytes) + kDyBytes;
    Strip at = strip_at(first);
    for (int i = 0; i < count; ++i, step(at)) {
      const int stage = i % kStages;
      const Strip from = images(at);
      empty[stage].wait(i / kStages % 2 ^ 1);  // at once the first time round
      full[stage].expect(bytes);
      load_strip<kPacked>(dy + stage * kDyBytes, &p.dy, &full[stage], feature, from, 0);
      load_strip<kPacked>(x + stage * kXBytes, &p.x.maps[place.part], &full[stage], place.channel, from, 1);
    }
  }

  __device__ void load_projected() const {
    const Place begin(p.projected, x_block * p.block_chunks);
    const int bytes = stage_bytes(), ring = stages();
    Strip at = strip_at(first);
    for (int i = 0, stage = 0, phase = 1; i < count; ++i, step(at)) {
      empty[stage].wait(phase);  // at once the first time round
      full[stage].expect(bytes);
      const Strip from = images(at);
      unsigned char* to = x + stage * bytes;
      load_strip<kPacked>(to, &p.dy, &full[stage], feature, from, 0);
      int part = begin.part, channel = begin.channel;
      for (int n = 0; n < chunks; ++n) {
        while (channel >= p.projected.channels[part]) {
          channel = 0;
          ++part;
        }
        to += kDyBytes;
        load_strip<kPacked>(to, &p.projected.maps[part], &full[stage], channel, from, 0);
        channel += kChunk;
      }
      if (++stage == ring) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

  // Three warps: what can be done beside the products.
  template <bool kActivated>
  __device__ void help() const {
    const Place place(p.x, x_block);
    const int thread = threadIdx.x % 128 - (128 - kHelpers), eighth = thread % 8, c = place.channel + eighth * 8;
    Coefficients coefficients;
    float totals[8];
    const unsigned char* pixels = chunks ? x : dy;
    const int bytes = chunks ? stage_bytes() : kDyBytes, ring = chunks ? stages() : kStages;
    Strip at = strip_at(first);
    int of_sample = -1, turn = turn_of(at.sample);
    // Splits before this one that meet the sample.
    int slot = split - (chunks ? p.shortcut : p.kernel).shares.first_split(at.sample);
    for (int i = 0, stage = 0, phase = 0; i < count; ++i, step(at)) {
      if (at.sample != of_sample) {
        if (of_sample >= 0) {
          if (turn == x_block) store_shift(totals, thread, of_sample, slot);
          slot = 0;
          if (++turn == x_blocks) turn = 0;
        }
        if constexpr (kActivated)
          coefficients = Coefficients(p.a, p.b, at.sample, place.first + c, c < p.x.channels[place.part]);
#pragma unroll
        for (int n = 0; n < 8; ++n) totals[n] = 0;
        of_sample = at.sample;
      }
      full[stage].wait(phase);
      if constexpr (kActivated) {
        activate_strip<T, kRows, kHelpers>(x + stage * kXBytes, at, p.height, p.width, thread, coefficients);
        fence_async();
        ready[stage].arrive();
      }
      if (sums_dy) {
        if (turn == x_block) add_dy(totals, pixels + stage * bytes, thread);
        __syncwarp();
        if (thread % 32 == 0) empty[stage].arrive();
      }
      if (++stage == ring) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (turn == x_block) store_shift(totals, thread, of_sample, slot);
  }

  // Each of the strip's samples has its share of the threads; packed ones take turns at them, as they do at the pixels.
  __device__ void add_dy(float (&totals)[8], const unsigned char* strip, int thread) const {
    constexpr int kPixels = kRows * kStripColumns, kReads = (kPixels + kHelperPixels - 1) / kHelperPixels;
    static_assert(kHelperPixels % kPaired == 0 && kHelperPixels % kPackedSamples == 0);
    const bool paired = !kPacked && p.samples > 1;
    const int eighth = thread % 8, stride = paired ? kHelperPixels / kPaired : kHelperPixels;
    const int pixels = paired ? kPixels / kPaired : kPixels;
    const int half = thread / 8 >= stride, first_pixel = half * pixels + thread / 8 - half * stride;
    Eight<T> values[kReads];
#pragma unroll
    for (int n = 0; n < kReads; ++n) {
      const int pixel = first_pixel + n * stride;
      values[n].clear();
      if (n + 1 < kReads || pixel < (half + 1) * pixels)
        values[n].load(reinterpret_cast<const T*>(strip + pixel * kRowBytes + ((eighth ^ pixel % 8) << 4)));
    }
#pragma unroll
    for (int n = 0; n < kReads; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) totals[i] += wide(values[n].at[i]);
    }
  }

  // Adds the helpers' sums of a sample, in order.
  __device__ void store_shift(const float (&totals)[8], int thread, int sample, int slot) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) scratch[thread / 8 * kChunk + thread % 8 * 8 + n] = totals[n];
    meet(1, kHelpers);
    if (thread < kChunk && feature + thread < p.features) {
      const bool last = (sample + 1) * p.kernel.shares.strips_of_sample <= first + count;
      const float* from = scratch + thread;
      for (int n = 0; n < p.samples && sample * p.samples + n < p.shift.batch; ++n) {
        float total = 0;
        if constexpr (kPacked) {
#pragma unroll
          for (int i = n; i < n + kHelperPixels; i += kPackedSamples) total += from[i * kChunk];
        } else {
#pragma unroll
          for (int i = 0; i < kHelperPixels / kPaired; ++i, from += kChunk) total += *from;
          if (p.samples == 1) {
#pragma unroll
            for (int i = 0; i < kHelperPixels / kPaired; ++i, from += kChunk) total += *from;
          }
        }
        p.shift.store(slot, last, sample * p.samples + n, feature + thread, total);
      }
    }
    meet(1, kHelpers);
  }

  __device__ void compute(int tap_row, Barrier* filled) const {
    const int lane = threadIdx.x % 32;
    float sums[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) sums[i] = 0;
    constexpr int kSteps = kRows / 2 / kPaired;                      // of K, in one of two samples
    const int between = kPacked || p.samples == 1 ? 0 : 2 * kBelow;  // the halo between two samples
    int held = -1;
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      filled[stage].wait(i / kStages % 2);
      const uint64_t left = matrix(shared_address(dy + stage * kDyBytes), 8 * kRowBytes);
      const uint64_t right = matrix(shared_address(x + stage * kXBytes) + tap_row * kBelow, kEight, kRight);
      begin_products();
#pragma unroll
      for (int k = 0; k < kRows / 2; ++k) {  // 16 pixels
        Product<T, true, true, 192>::run(sums, advance(left, 16 * kRowBytes * k),
                                         advance(right, kRowsOfStep * kBelow * k + k / kSteps * between), true);
      }
      commit_products();
      wait_products<1>();
      if (held >= 0 && lane == 0) empty[held].arrive();
      held = stage;
    }
    wait_products<0>();
    settle(sums);

    if (p.tiled) {
      float* to = p.sums + (static_cast<int64_t>(split) * p.kernel.tiles + tile) * TileOfSums::kEntries +
                  TileOfSums::entry(tap_row, 0, threadIdx.x % 128);
#pragma unroll
      for (int n = 0; n < TileOfSums::kFours; ++n) {
        const float* four = sums + 4 * n;
        *reinterpret_cast<float4*>(to + TileOfSums::entry(0, n, 0)) = {four[0], four[1], four[2], four[3]};
      }
      return;
    }
    const Place place(p.x, x_block);
#pragma unroll
    for (int tap = 0; tap < 3; ++tap) {
      store(sums + 32 * tap, p.x, place,
            p.sums + (static_cast<int64_t>(split) * 9 + 3 * tap_row + tap) * p.x.total * p.features);
    }
  }

  // The sums of one tap or chunk. Eight lanes hold eight neighbours along the features: a sector of 32 bytes. Channels
  // and features come in eights, so that a warp's rows and columns of eight are there as a whole or not at all.
  __device__ void store(const float* sums, const Image& image, const Place& place, float* to) const {
    const int lane = threadIdx.x % 32, f = feature + 16 * (threadIdx.x % 128 / 32) + lane / 4;
    const int rows = (image.channels[place.part] - place.channel) / 8;  // of eight channels
    const bool low = f < p.features, high = f + 8 < p.features;
    const int64_t features = p.features;
    float* at = to + (place.first + place.channel + lane % 4 * 2) * features + f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= rows) break;
      if (low) {
        at[0] = sums[4 * j];
        at[features] = sums[4 * j + 1];
      }
      if (high) {
        at[8] = sums[4 * j + 2];
        at[features + 8] = sums[4 * j + 3];
      }
      at += 8 * features;
    }
  }

  // Two chunks for each warpgroup, or the last one alone.
  __device__ void compute_projected(int warpgroup) const {
    const int own = kPair * warpgroup, rest = chunks - own;
    if (rest >= kPair) {
      compute_chunks<kPair>(own);
    } else if (rest > 0) {
      compute_chunks<1>(own);
    }
  }

  template <int kCount>
  __device__ void compute_chunks(int own) const {
    const int bytes = stage_bytes(), ring = stages(), lane = threadIdx.x % 32;
    float sums[32 * kCount];
#pragma unroll
    for (int i = 0; i < 32 * kCount; ++i) sums[i] = 0;
    int held = -1;
    for (int i = 0, stage = 0, phase = 0; i < count; ++i) {
      full[stage].wait(phase);
      const uint32_t from = shared_address(x + stage * bytes);
      const uint64_t left = matrix(from, 8 * kRowBytes);
      const uint64_t right = matrix(from + (1 + own) * kDyBytes, 8 * kRowBytes, kDyBytes);
      begin_products();
#pragma unroll
      for (int k = 0; k < kRows / 2; ++k) {
        Product<T, true, true, kChunk * kCount>::run(sums, advance(left, 16 * kRowBytes * k),
                                                     advance(right, 16 * kRowBytes * k), true);
      }
      commit_products();
      wait_products<1>();
      if (held >= 0 && lane == 0) empty[held].arrive();
      held = stage;
      if (++stage == ring) {
        stage = 0;
        phase ^= 1;
      }
    }
    wait_products<0>();
    settle(sums);
    float* to = p.shortcut_sums + static_cast<int64_t>(split) * p.projected.total * p.features;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      store(sums + 32 * n, p.projected, Place(p.projected, x_block * p.block_chunks + own + n), to);
    }
  }
};

}  // namespace jaxunet::cuda::weight_gradient
