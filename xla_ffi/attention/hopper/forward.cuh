// Attention forward on Hopper for heads that fit in shared memory as a whole: 64 tokens and 32 or
// 64 channels, or 256 tokens and 32 channels. shapes.cuh dispatches; streaming.cuh takes larger
// heads.
//   out = softmax(q * k^T / sqrt(width)) * v, and the log-sum-exp of each row.
//
// A *unit* is 128 queries: half a head of 256 tokens, or two heads of 64 tokens. A block has two
// warpgroups, is persistent and processes one unit after another. Two blocks share a
// multiprocessor, so that the softmax of one overlaps the wgmmas of the other.
//
//     global memory             shared memory                 registers
//
//     qkv       ---TMA--->      2 stages of {q, k, v}  --->   warpgroup 0, 1: 64 queries each
//               by thread 0,                                    s = q * k^T     (wgmma)
//               one unit ahead                                  online softmax of s
//                                                               out += p * v    (wgmma; p is its
//     out, lse  <--------------------------------------         left operand, from registers)
//
// The mainloop iterates over all keys of the head, kStepKeys at a time.
//
// Barriers (mbarrier), whose parities alternate from 0:
//
//     barrier  waits        arrives (arrivals)                       parity waited for
//     full[2]  all threads  thread 0 (1 + bytes of the unit's boxes) 0, flips when the ring wraps
//
// There is no empty barrier: one __syncthreads per unit ensures that no warp still reads the stage
// that the next loads overwrite.
//
// Shared memory: 2 stages of {q [128], k, v [kKeyRows]} [kWidth], swizzled; barriers.
#pragma once

#include <cmath>

#include "attention/hopper/tile.cuh"
#include "attention/plan.h"
#include "common/launch.cuh"
#include "common/tma.cuh"

namespace jaxunet::cuda::hopper_attention {

struct ForwardParameters {
  CUtensorMap queries, keys;  // maps of qkv; boxes of 64 rows, and of one head's tokens
  void* out;
  float* lse;
  int heads, all_heads;  // per sample; in the batch
  int units;             // in the batch
};

// The fastest options on an H200; to refit one, change it and run tests/gpu/harness/attn.
template <class T_, int kWidth_, int kTokens_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kWidth = kWidth_, kTokens = kTokens_;
  // Keys per mainloop step. With 128, ptxas has too few registers to overlap the wgmmas (its
  // message C7512). With 64 it overlaps them, but 256 tokens take 1.09 times as long.
  static constexpr int kStepKeys = kTokens < 128 ? kTokens : 128;
  static constexpr int kStages = 2;       // units in shared memory
  static constexpr int kBlocksPerSm = 2;  // concurrent blocks per multiprocessor
  static constexpr int kWarpgroups = 2, kThreads = kWarpgroups * kWarpgroup,
                       kQueryRows = kWarpgroups * kTileRows;
  // Heads per unit and units per head: one of the two is 1.
  static constexpr int kUnitHeads = kTokens < kQueryRows ? kQueryRows / kTokens : 1;
  static constexpr int kHeadUnits = kTokens < kQueryRows ? 1 : kTokens / kQueryRows;
  static constexpr int kKeyRows = kUnitHeads * kTokens;  // rows of k, and of v, per stage
  static constexpr int kQueryBytes = kQueryRows * kWidth * 2, kKeyBytes = kKeyRows * kWidth * 2,
                       kStageBytes = kQueryBytes + 2 * kKeyBytes;
  static constexpr int kBytes = kStages * kStageBytes + kStages * 8;
};

template <class Traits>
struct ForwardBlock {
  using T = typename Traits::T;
  using Tile = HeadTile<Traits::kWidth>;
  static constexpr int kWidth = Traits::kWidth, kStepKeys = Traits::kStepKeys,
                       kTokens = Traits::kTokens;

  const ForwardParameters& p;
  unsigned char* const shared;
  Barrier* full;

  __device__ ForwardBlock(const ForwardParameters& parameters, unsigned char* memory)
      : p(parameters),
        shared(memory),
        full(reinterpret_cast<Barrier*>(memory + Traits::kStages * Traits::kStageBytes)) {}

  // One thread: starts to load a unit. The last unit may have fewer heads.
  __device__ void load(int unit, int stage) const {
    unsigned char* const to = shared + stage * Traits::kStageBytes;
    const int first = unit / Traits::kHeadUnits * Traits::kUnitHeads,
              row = unit % Traits::kHeadUnits * Traits::kQueryRows,
              count = min(Traits::kUnitHeads, p.all_heads - first);
    constexpr int tile_bytes = kTileRows * kWidth * 2, head_bytes = kTokens * kWidth * 2;
    constexpr int head_tiles = Traits::kWarpgroups / Traits::kUnitHeads;
    full[stage].arrive_expect(count * (head_tiles * tile_bytes + 2 * head_bytes));
    for (int i = 0; i < count; ++i) {
      const Place at(first + i, p.heads, kWidth);
      for (int tile = 0; tile < head_tiles; ++tile) {
        tma_load(to + (i * head_tiles + tile) * tile_bytes, &p.queries, full + stage, at.channel,
                 row + tile * kTileRows, at.sample);
      }
      for (int which = 0; which < 2; ++which) {
        tma_load(to + Traits::kQueryBytes + which * Traits::kKeyBytes + i * head_bytes, &p.keys,
                 full + stage, at.channel + (1 + which) * p.heads * kWidth, 0, at.sample);
      }
    }
  }

  // Starts s = q * k^T for the keys at `k`.
  static __device__ void start_logits(float (&s)[kStepKeys / 2], uint32_t q, uint32_t k) {
    const uint64_t left = Tile::descriptor(q), right = Tile::descriptor(k);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      Wgmma<T, false, false, kStepKeys>::run(s, advance(left, step * Tile::kKMajorStep),
                                             advance(right, step * Tile::kKMajorStep), step > 0);
    }
  }

  // Starts out += weights * v for the values at `v`.
  static __device__ void start_out(float (&out)[kWidth / 2],
                                   const uint32_t (&weights)[kStepKeys / 16][4], uint32_t v) {
    const uint64_t right = Tile::descriptor(v);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepKeys / 16; ++step) {
      WgmmaRegisters<T, true, kWidth>::run(out, weights[step],
                                           advance(right, step * Tile::kMnMajorStep), true);
    }
    wgmma_commit();
  }

  // One warpgroup: computes 64 queries from `row` of a head on. q: address of these rows; k, v:
  // addresses of the head's first row. The product with v is still running when the logits of the
  // next step are issued.
  __device__ void compute(uint32_t q, uint32_t k, uint32_t v, int head, int row) const {
    float out[kWidth / 2], max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) out[i] = 0;
#pragma unroll 1
    for (int first = 0; first < kTokens; first += kStepKeys) {
      float s[kStepKeys / 2], rescale[2];
      start_logits(s, q, k + first * Tile::kRowBytes);
      wgmma_commit();
      wgmma_wait<0>();
      fence_accumulator(s);
      fence_accumulator(out);
      online_softmax<kStepKeys>(s, kScale2<kWidth>, max, sum, rescale);
      scale_rows(out, rescale);
      uint32_t weights[kStepKeys / 16][4];
      left_from_accumulator<T, kStepKeys>(weights, s);
      start_out(out, weights, v + first * Tile::kRowBytes);
    }
    wgmma_wait<0>();
    fence_accumulator(out);
    write(out, max, sum, head, row);
  }

  // Divides by the sums, and writes 64 rows of the output and their log-sum-exp.
  __device__ void write(const float (&out)[kWidth / 2], const float (&max)[2], float (&sum)[2],
                        int head, int row) const {
    const int stride = p.heads * kWidth;
    write_lse(p.lse + static_cast<int64_t>(head) * kTokens + row, kScale2<kWidth>, max, sum);
    const Place at(head, p.heads, kWidth);
    T* const to = static_cast<T*>(p.out) +
                  (static_cast<int64_t>(at.sample) * kTokens + row) * stride + at.channel;
    write_rows<kWidth>(to, stride, out, 1 / sum[0], 1 / sum[1]);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    hopper_attention_forward_kernel(const __grid_constant__ ForwardParameters p) {
#ifdef JAXUNET_SM90A_PASS
  const ForwardBlock<Traits> block(p, shared_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) block.full[i].init(1);
    fence_barrier_init();
    prefetch_tensor_map(&p.queries);
    prefetch_tensor_map(&p.keys);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) block.load(blockIdx.x, 0);
  int count = 0;
  for (int unit = blockIdx.x; unit < p.units; unit += gridDim.x, ++count) {
    if (count > 0) __syncthreads();  // no warp reads the previous unit
    const int next = unit + gridDim.x, stage = count % Traits::kStages;
    if (threadIdx.x == 0 && next < p.units) block.load(next, (count + 1) % Traits::kStages);
    __syncwarp();
    block.full[stage].wait(count / Traits::kStages & 1);
    constexpr int kOwnHead = Traits::kUnitHeads > 1 ? 1 : 0;  // one per warpgroup, else shared
    const int head = unit / Traits::kHeadUnits * Traits::kUnitHeads + kOwnHead * warpgroup,
              row = unit % Traits::kHeadUnits * Traits::kQueryRows +
                    (1 - kOwnHead) * warpgroup * kTileRows;
    if (head < p.all_heads) {
      constexpr int row_bytes = HeadTile<Traits::kWidth>::kRowBytes;
      const uint32_t q = shared_address(block.shared + stage * Traits::kStageBytes),
                     k = q + Traits::kQueryBytes +
                         kOwnHead * warpgroup * Traits::kTokens * row_bytes;
      block.compute(q + warpgroup * kTileRows * row_bytes, k, k + Traits::kKeyBytes, head, row);
    }
  }
#else
  __trap();  // never launched: dispatch.cu
#endif
}

}  // namespace jaxunet::cuda::hopper_attention
