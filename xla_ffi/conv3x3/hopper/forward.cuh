// Forward and input gradient of the 3×3 convolution on Hopper: an implicit GEMM that reads each input strip once, with
// its halo, and multiplies it at nine offsets.
//
// The copy engine's box of 10 columns × (rows + 2) × 64 channels starts one pixel above and to the left of a strip;
// what lies outside the image reads as zeros. In shared memory a pixel is one swizzled row of 128 bytes, so tap (dy,
// dx) is the same buffer, its start moved by dy · 10 + dx rows and its 8-pixel groups 10 rows apart: the input passes
// L2 once instead of nine times. A packed strip (hopper_tile.h) is read through a map with the samples next to the
// channels: its box is 64 channels × samples × 6 columns × 6 rows, and the 8-pixel groups lie in line.
//
// Warpgroups of a block: those that compute, one that loads, and with an activation as many that apply it to the strips
// in place. A shortcut is extra K: the centre tap of what it projects times its weights; it may be all there is, and is
// then a linear layer. Outputs leave through shared memory, in the layout of the copy engine's boxes, where a plain
// residual has been waiting.
#pragma once

#include "conv3x3/portable/implicit_gemm.cuh"
#include "conv3x3/hopper/activation.cuh"
#include "conv3x3/hopper/forward.h"
#include "common/tma.cuh"
#include "conv3x3/hopper/strip.cuh"
#include "common/launch.cuh"
#include "common/wgmma.cuh"

namespace jaxunet::cuda::forward {

// What the warpgroups of a block share.
template <class T, class Cut, bool kFlipped>
struct Block {
  static constexpr int kPixels = Cut::kPixels, kColumns = Cut::kColumns, kGroups = Cut::kGroups, kTaps = Cut::kTaps,
                       kLoads = 9 / kTaps, kCentre = 4;
  static constexpr int kBlocks = Cut::kFeatures / kChunk;  // of 64 output channels

  const Parameters& p;
  unsigned char *strips, *stages, *staged;
  Barrier *strip_full, *strip_ready, *strip_empty, *stage_full, *stage_empty, *residual_full, *turn;

  __device__ Block(const Parameters& parameters, unsigned char* shared) : p(parameters) {
    strips = shared;
    staged = strips + kGroups * kSlots * Cut::kStripBytes;
    stages = staged + kGroups * Cut::kStagedBytes;
    auto* barriers = reinterpret_cast<Barrier*>(stages + p.schedule.stages * Cut::kStageBytes);
    strip_full = barriers;
    strip_ready = strip_full + kGroups * kSlots;
    strip_empty = strip_ready + kGroups * kSlots;
    residual_full = strip_empty + kGroups * kSlots;
    turn = residual_full + kGroups;
    stage_full = turn + 2;
    stage_empty = stage_full + p.schedule.stages;
  }

  __device__ void init() const {
    for (int i = 0; i < kGroups * kSlots; ++i) {
      strip_full[i].init(1);
      strip_ready[i].init(128);
      strip_empty[i].init(4);
    }
    for (int i = 0; i < kGroups; ++i) residual_full[i].init(1);
    for (int i = 0; i < 2; ++i) turn[i].init(128);
    for (int i = 0; i < p.schedule.stages; ++i) {
      stage_full[i].init(1);
      stage_empty[i].init(4 * kGroups);
    }
  }

  // The copy engine reads its maps before its first copies.
  __device__ void prefetch() const {
    prefetch_map(p.x_parts > 0 ? &p.maps.x[0] : &p.maps.extra[0]);
    prefetch_map(p.x_parts > 0 ? &p.maps.kernel : &p.maps.shortcut);
    prefetch_map(&p.maps.y[0]);
    if (p.residual) prefetch_map(&p.maps.residual);
  }

  __device__ unsigned char* strip(int group, int slot) const {
    return strips + (group * kSlots + slot) * Cut::kStripBytes;
  }

  __device__ Strip strip_at(int strip) const {
    const int each = p.schedule.strips_down * p.schedule.strips_across, sample = strip / each,
              rest = strip - sample * each;
    const int down = rest / p.schedule.strips_across;
    return {sample * Cut::kSamples, down * Cut::kRows, (rest - down * p.schedule.strips_across) * Cut::kStripColumns};
  }

  // body(first strip, first output channel) for this block's tiles. Blocks side by side share pixels, so that L2 serves
  // them once.
  template <class Body>
  __device__ void each_tile(Body body) const {
    for (int tile = blockIdx.x; tile < p.schedule.tiles; tile += gridDim.x) {
      const int strips = tile / p.schedule.feature_tiles;
      body(strips * kGroups, (tile - strips * p.schedule.feature_tiles) * Cut::kFeatures);
    }
  }

  // --- loading: one thread ---
  __device__ void load() const {
    int slot = 0, slot_phase = 0, stage = 0, stage_phase = 0;
    bool first_tile = true;

    const auto load_strips = [&](const CUtensorMap* map, int channel, int first_strip) {
      for (int group = 0; group < kGroups; ++group) {
        const int n = group * kSlots + slot;
        strip_empty[n].wait(slot_phase ^ 1);  // at once the first time round
        strip_full[n].expect(Cut::kBoxBytes);
        load_strip<Cut::kPacked>(strip(group, slot), map, &strip_full[n], channel, strip_at(first_strip + group), 1);
      }
      slot = (slot + 1) % kSlots;
      slot_phase ^= slot == 0;
    };
    const auto load_stage = [&](const CUtensorMap* map, bool across, int channel, int feature, int tap, int taps) {
      if (p.schedule.resident && !first_tile) return;
      stage_empty[stage].wait(stage_phase ^ 1);
      stage_full[stage].expect(taps * Cut::kFeatures * kRowBytes);
      unsigned char* to = stages + stage * Cut::kStageBytes;
      if (across) {
        for (int n = 0; n < kBlocks; ++n) {
          load_box(to + n * kTaps * kChunk * kRowBytes, map, &stage_full[stage], feature + n * kChunk, channel, tap);
        }
      } else {
        load_box(to, map, &stage_full[stage], channel, feature, tap);
      }
      if (++stage == p.schedule.stages) {
        stage = 0;
        stage_phase ^= 1;
      }
    };

    each_tile([&](int first_strip, int feature) {
      int channel = 0;  // of all parts
      for (int part = 0; part < p.x_parts; ++part) {
        for (int c = 0; c < p.x_channels[part]; c += kChunk) {
          load_strips(&p.maps.x[part], c, first_strip);
          for (int n = 0; n < kLoads; ++n)
            load_stage(&p.maps.kernel, !kFlipped, channel + c, feature, n * kTaps, kTaps);
        }
        channel += p.x_channels[part];
      }
      channel = 0;
      for (int part = 0; part < p.extra_parts; ++part) {
        for (int c = 0; c < p.extra_channels[part]; c += kChunk) {
          load_strips(&p.maps.extra[part], c, first_strip);
          load_stage(&p.maps.shortcut, !kFlipped, channel + c, feature, 0, 1);
        }
        channel += p.extra_channels[part];
      }
      first_tile = false;
    });
  }

  // --- activation: a warpgroup for the strips of one computing warpgroup ---
  __device__ void activate(int group) const {
    const int thread = threadIdx.x % 128, eighth = thread % 8;  // its channels of a pixel's 64
    int slot = 0, phase = 0;
    each_tile([&](int first_strip, int) {
      const Strip at = strip_at(first_strip + group);
      const int64_t sample = at.sample < p.schedule.batch ? at.sample : p.schedule.batch - 1;
      int channel = 0;
      for (int part = 0; part < p.x_parts; ++part) {
        for (int c = eighth * 8; c < p.x_channels[part] + eighth * 8; c += kChunk) {
          const Coefficients coefficients(p.a, p.b, sample, channel + c, c < p.x_channels[part]);
          const int n = group * kSlots + slot;
          strip_full[n].wait(phase);
          activate_strip<T, Cut::kRows, 128>(strip(group, slot), at, p.schedule.height, p.schedule.width, thread,
                                             coefficients);
          fence_async();
          strip_ready[n].arrive();
          slot = (slot + 1) % kSlots;
          phase ^= slot == 0;
        }
        channel += p.x_channels[part];
      }
      for (int step = 0; step < p.schedule.extras; ++step) {
        strip_full[group * kSlots + slot].wait(phase);
        strip_ready[group * kSlots + slot].arrive();
        slot = (slot + 1) % kSlots;
        phase ^= slot == 0;
      }
    });
  }

  // --- products: a warpgroup, one strip of every tile ---
  using Sums = float[kColumns / 2];

  // One tap of 64 channels.
  __device__ static void multiply(Sums& sums, uint32_t strip, int tap, uint32_t weights, bool across, bool add) {
    const uint64_t pixels = matrix(strip + Cut::tap_row(tap) * kRowBytes, Cut::kRowsOfEight * kRowBytes);
    const uint64_t along = matrix(weights, 8 * kRowBytes),
                   over = matrix(weights, 8 * kRowBytes, kTaps * kChunk * kRowBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 channels
      const uint64_t x = advance(pixels, 32 * k);
      if (across) {
        const uint64_t w = advance(over, 16 * kRowBytes * k);
        if constexpr (Cut::kTransposed) {
          Product<T, true, false, kColumns>::run(sums, w, x, add || k > 0);
        } else {
          Product<T, false, true, kColumns>::run(sums, x, w, add || k > 0);
        }
      } else {
        const uint64_t w = advance(along, 32 * k);
        if constexpr (Cut::kTransposed) {
          Product<T, false, false, kColumns>::run(sums, w, x, add || k > 0);
        } else {
          Product<T, false, false, kColumns>::run(sums, x, w, add || k > 0);
        }
      }
    }
  }

  __device__ float shift_of(int sample, int feature) const {
    const int64_t row = sample < p.schedule.batch ? sample : p.schedule.batch - 1;
    return p.shift.data && feature < p.features ? p.shift.data[row * p.shift.stride + feature] : 0.0f;
  }

  // Read before the products, whose time then hides the way from memory: all shifts that a thread needs, of its two
  // rows of the product and, where they are of several samples, its two columns of each eight; or where the rows are
  // pixels, those of the whole tile, a thread each, so that they are near when their time comes.
  static constexpr int kShifts = Cut::kPacked ? 2 : 1;
  struct Ahead {
    float shifts[2][kShifts];
  };
  __device__ Ahead look_ahead(const Strip& at, int feature) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    Ahead ahead{};
#pragma unroll
    for (int i = 0; i < 2 * kShifts; ++i) {
      const int row = i / kShifts, column = i % kShifts;
      if constexpr (Cut::kTransposed) {
        ahead.shifts[row][column] =
            shift_of(at.sample + (lane % 4 * 2 + column) % Cut::kSamples, feature + 16 * warp + lane / 4 + 8 * row);
      } else if (128 * row < Cut::kFeatures) {
        ahead.shifts[row][column] = shift_of(at.sample, feature + 128 * row + thread);
      }
    }
    return ahead;
  }

  __device__ void compute(int group) const {
    const int thread = threadIdx.x % 128;
    const bool in_turns =
        p.schedule.resident && kGroups == 2;  // one warpgroup's epilogue then overlaps the other's products
    const bool speaks = thread % 32 == 0;     // for its warp
    Barrier* ready = (Cut::kActivated ? strip_ready : strip_full) + group * kSlots;
    int slot = 0, slot_phase = 0, stage = 0, stage_phase = 0, tile_phase = 0;
    if (in_turns && group == 1) turn[0].arrive();
    int turn_phase = 0;

    each_tile([&](int first_strip, int feature) {
      const Strip at = strip_at(first_strip + group);
      unsigned char* out = staged + group * Cut::kStagedBytes;
      if (p.residual && thread == 0) {
        wait_stores();
        residual_full[group].expect(Cut::kStagedBytes);
        for (int n = 0; n < kBlocks; ++n) {
          load_strip<Cut::kPacked>(out + n * kPixels * kRowBytes, &p.maps.residual, &residual_full[group],
                                   feature + n * kChunk, at, 0);
        }
      }
      Sums sums;
      const Ahead ahead = look_ahead(at, feature);
      int held_slot = -1, held_stage = -1;
      if (p.schedule.resident) stage = stage_phase = 0;

      // Buffers are released one load late, so that the tensor cores always have products waiting.
      const auto release_stage = [&](int next) {
        if (held_stage >= 0 && speaks && !p.schedule.resident) stage_empty[held_stage].arrive();
        held_stage = next;
      };
      const auto release_slot = [&](int next) {
        if (held_slot >= 0 && speaks) strip_empty[group * kSlots + held_slot].arrive();
        held_slot = next;
      };
      const auto next_stage = [&] {
        if (++stage == p.schedule.stages) {
          stage = 0;
          stage_phase ^= 1;
        }
      };
      const auto begin_step = [&] {
        ready[slot].wait(slot_phase);
        if (in_turns) {
          turn[group].wait(turn_phase);
          turn_phase ^= 1;
        }
        return shared_address(strip(group, slot));
      };
      const auto end_step = [&] {
        if (in_turns) turn[group ^ 1].arrive();
        slot = (slot + 1) % kSlots;
        slot_phase ^= slot == 0;
      };

      for (int chunk = 0; chunk < p.schedule.chunks; ++chunk) {
        const uint32_t pixels = begin_step();
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
          stage_full[stage].wait(stage_phase);
          begin_products();
#pragma unroll
          for (int t = 0; t < kTaps; ++t) {
            const int tap = n * kTaps + t;
            const uint32_t weights = shared_address(stages) + stage * Cut::kStageBytes +
                                     t * (kFlipped ? Cut::kFeatures : kChunk) * kRowBytes;
            multiply(sums, pixels, kFlipped ? 8 - tap : tap, weights, !kFlipped, chunk > 0 || tap > 0);
          }
          commit_products();
          wait_products<1>();
          if (n == 0) release_slot(slot);
          release_stage(stage);
          next_stage();
        }
        end_step();
      }
      for (int step = 0; step < p.schedule.extras; ++step) {
        const uint32_t pixels = begin_step();
        stage_full[stage].wait(stage_phase);
        begin_products();
        multiply(sums, pixels, kCentre, shared_address(stages) + stage * Cut::kStageBytes, !kFlipped,
                 p.schedule.chunks > 0 || step > 0);
        commit_products();
        wait_products<1>();
        release_slot(slot);
        release_stage(stage);
        next_stage();
        end_step();
      }
      wait_products<0>();
      settle(sums);
      release_slot(-1);
      release_stage(-1);
      finish(sums, ahead, group, at, feature, out, tile_phase);
      tile_phase ^= 1;
    });
    if (thread == 0) wait_stores();
  }

  // --- the way out ---
  __device__ void finish(const Sums& sums, const Ahead& ahead, int group, const Strip& at, int feature,
                         unsigned char* out, int phase) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, block = lane / 8;
    asm volatile("" ::"f"(ahead.shifts[0][0]), "f"(ahead.shifts[1][0]));  // they have been read
    if (p.residual) {
      residual_full[group].wait(phase);
    } else {
      if (thread == 0) wait_stores();
      meet(1 + group, 128);
    }
#pragma unroll
    for (int j = 0; j < Cut::kKeptEights; j += 2) {  // 8 columns of the product: 8 pixels, or output channels
      const float* of_columns = sums + 4 * Cut::kept_eight(j);
      // The four 8 × 8 blocks: rows 0-7 and 8-15 of the warp's 16, of columns j and j + 1.
      const int pixel = Cut::kTransposed ? (j + block / 2) * 8 + lane % 8 : 16 * warp + block % 2 * 8 + lane % 8;
      const int eight = Cut::kTransposed ? 2 * warp + block % 2 : j + block / 2;
      const uint32_t row =
          shared_address(out) + (eight / 8 * kPixels + pixel) * kRowBytes + ((eight % 8 ^ pixel % 8) << 4);
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int f = feature + 8 * (j + i / 4) + lane % 4 * 2 + i % 2;
        values[i] = of_columns[i] + (Cut::kTransposed ? ahead.shifts[i / 2 % 2][i % kShifts] : shift_of(at.sample, f));
      }
      if (p.residual) {
        uint32_t added[4];
        load_fragments<Cut::kTransposed>(added, row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          T pair[2];
          memcpy(pair, &added[i], 4);
          values[2 * i] += wide(pair[0]);
          values[2 * i + 1] += wide(pair[1]);
        }
      }
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T pair[2] = {narrow<T>(values[2 * i]), narrow<T>(values[2 * i + 1])};
        memcpy(&packed[i], pair, 4);
      }
      store_fragments<Cut::kTransposed>(row, packed);
    }
    fence_async();
    meet(1 + group, 128);
    if (thread == 0) {
      for (int n = 0; n < kBlocks; ++n) {
        int part = 0, channel = feature + n * kChunk;
        while (part + 1 < p.y_parts && channel >= p.y_channels[part]) channel -= p.y_channels[part++];
        store_strip<Cut::kPacked>(&p.maps.y[part], out + n * kPixels * kRowBytes, channel, at);
      }
      commit_stores();
    }
  }
};

template <class T, class Cut, bool kFlipped>
__global__ void __launch_bounds__(Cut::kThreads, 1)
    hopper_forward_kernel(const __grid_constant__ Parameters parameters) {
#ifdef JAXUNET_HOPPER
  const Block<T, Cut, kFlipped> block(parameters, shared_memory());
  if (threadIdx.x == 0) {
    block.init();
    publish_barriers();
  }
  if (threadIdx.x == Cut::kThreads - 1) block.prefetch();
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  constexpr bool shared_out = Cut::kWarpgroups > 2;
  if (warpgroup < Cut::kGroups) {
    if constexpr (shared_out) set_registers<Cut::kComputingRegisters, true>();
    block.compute(warpgroup);
  } else if (warpgroup == Cut::kGroups) {
    if constexpr (shared_out) set_registers<Cut::kLoadingRegisters, false>();
    if (threadIdx.x % 128 == 0) block.load();
  } else if constexpr (Cut::kActivated) {
    set_registers<Cut::kActivatingRegisters, false>();
    block.activate(warpgroup - Cut::kGroups - 1);
  }
#endif
}

}  // namespace jaxunet::cuda::forward
