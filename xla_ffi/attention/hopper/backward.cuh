// Attention backward on Hopper for heads that fit in shared memory as a whole: 256 tokens and 32 or
// 64 channels, or 64 tokens and 64 channels. shapes.cuh dispatches; streaming.cuh takes larger
// heads. The formulas, as in flash_backward.cuh:
//   p = exp(s - lse),  dp = dO * v^T,  ds = p * (dp - delta),
//   dv = p^T * dO,  dk = ds^T * q / sqrt(width),  dq = ds * k / sqrt(width).
//
// All gradients of a head come from one block, which computes p and ds once. (Blocks that own
// queries or keys, as in flash_backward.cuh, compute them twice.) Blocks are persistent and process
// one head after another. For heads of 256 tokens, a block has four warpgroups and a multiprocessor
// one block; for heads of 64 tokens, a block has one warpgroup and a multiprocessor four blocks.
//
// Warpgroup i owns 64 keys and keeps their dk and dv in registers. It iterates over the tiles of 64
// queries, kStepQueries queries at a time. Both products are transposed, so that their results are
// the left operands of the next products:
//   s^T = k * q^T,  dp^T = v * dO^T    (wgmma)  ->  p^T, ds^T  ->  dv += p^T * dO,  dk += ds^T * q
// ds^T also goes to a *slot* of shared memory, which holds one tile of queries and all keys. Once
// all warpgroups have written it, one of them computes the tile's dq from it:
//
//                          tile of queries
//                          0      1      2      3
//     warpgroup 0, keys 0  ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys   0 to  63
//     warpgroup 1, keys 1  ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys  64 to 127
//     warpgroup 2, keys 2  ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys 128 to 191
//     warpgroup 3, keys 3  ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys 192 to 255
//                           |      |      |      |
//                           v      v      v      v
//     dq, by warpgroup      0      1      2      3        a column is a slot; kSlots = 2 in flight
//
// Each sum is over one warpgroup's products in a fixed order, without atomics, so results are the
// same in every run. Thread 0 also issues the TMA loads: with kStages = 2 it loads the next head
// before the current one is computed, otherwise the current head. Before the products of a head,
// all threads compute its deltas, the sum of dO * out over each row.
//
// Shared memory: kStages x {q, k, v, dO, out} [kTokens][kWidth]; kSlots x ds^T [keys][64 queries],
// swizzled; lse (base two) and delta, float [kTokens] each; barriers.
//
// Barriers (mbarrier). Parities alternate from 0; a wait for parity 1 returns at once in the first
// round. [t]: stage; [s]: slot.
//
//     barrier     waits                  arrives (arrivals)           parity waited for
//     full[t]     all threads            thread 0 (1 + bytes of the   0, flips when the ring wraps
//                                        head's boxes)
//     written[s]  the warpgroup that     all threads, when they have  0, flips when the slots wrap
//                 computes dq            stored their ds^T
//     read[s]     all threads, before    the warpgroup that has       1, flips when the slots wrap
//                 they store ds^T        computed dq (128)
//
// __syncthreads: before the loads of the next head, so that no warp still reads the previous head;
// and after the deltas.
#pragma once

#include <cmath>

#include "attention/hopper/tile.cuh"
#include "attention/plan.h"
#include "common/launch.cuh"
#include "common/tma.cuh"

namespace jaxunet::cuda::hopper_attention {

struct BackwardParameters {
  CUtensorMap qkv, out, grad;  // boxes of one head's tokens
  const float* lse;
  void* dqkv;
  int heads, all_heads;  // per sample; in the batch
};

// The fastest options on an H200; to refit one, change it and run tools/gpu/harness/attn.
template <class T_, int kWidth_, int kTokens_>
struct BackwardTraits {
  using T = T_;
  static constexpr int kWidth = kWidth_, kTokens = kTokens_;
  static constexpr int kTiles = kTokens / kTileRows;  // tiles of 64 queries; warpgroups per block
  // True if a warpgroup keeps its k and v in registers, which saves reading them for each product.
  static constexpr bool kKeepsKeys = kWidth == 32;
  static constexpr int kStages = kWidth == 32 ? 2 : 1;        // heads in shared memory
  static constexpr int kStepQueries = kTiles == 1 ? 64 : 32;  // queries per mainloop step
  static constexpr int kBlocksPerSm = 4 / kTiles;  // concurrent blocks per multiprocessor
  static constexpr int kThreads = kTiles * kWarpgroup;
  static constexpr int kSlots = kTiles > 1 ? 2 : 1;  // for ds^T
  static constexpr int kArrayBytes = kTokens * kWidth * 2, kStageBytes = 5 * kArrayBytes,
                       kSlotBytes = kTokens * kTileRows * 2;
  static constexpr int kBytes =
      kStages * kStageBytes + kSlots * kSlotBytes + 2 * kTokens * 4 + (kStages + 2 * kSlots) * 8;
};

template <class Traits>
struct BackwardBlock {
  using T = typename Traits::T;
  using Tile = HeadTile<Traits::kWidth>;
  static constexpr int kWidth = Traits::kWidth, kTokens = Traits::kTokens, kTiles = Traits::kTiles,
                       kStepQueries = Traits::kStepQueries;

  const BackwardParameters& p;
  unsigned char* const shared;
  float *lses, *deltas;
  Barrier *full, *written, *read;

  __device__ BackwardBlock(const BackwardParameters& parameters, unsigned char* memory)
      : p(parameters), shared(memory) {
    lses = reinterpret_cast<float*>(shared + Traits::kStages * Traits::kStageBytes +
                                    Traits::kSlots * Traits::kSlotBytes);
    deltas = lses + kTokens;
    full = reinterpret_cast<Barrier*>(deltas + kTokens);
    written = full + Traits::kStages;
    read = written + Traits::kSlots;
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < Traits::kStages; ++i) full[i].init(1);
    for (int i = 0; i < Traits::kSlots; ++i) {
      written[i].init(kTiles * kWarpgroup);
      read[i].init(kWarpgroup);
    }
  }

  // An array of a stage: Qkv or Unpacked.
  __device__ unsigned char* array(int stage, int which) const {
    return shared + stage * Traits::kStageBytes + which * Traits::kArrayBytes;
  }
  __device__ uint32_t slot(int which) const {
    return shared_address(shared + Traits::kStages * Traits::kStageBytes +
                          which * Traits::kSlotBytes);
  }

  // One thread: starts to load a head.
  __device__ void load(int head, int stage) const {
    full[stage].arrive_expect(Traits::kStageBytes);
    const Place at(head, p.heads, kWidth);
    for (int which = kQ; which <= kV; ++which) {
      tma_load(array(stage, which), &p.qkv, full + stage, at.channel + which * p.heads * kWidth, 0,
               at.sample);
    }
    tma_load(array(stage, kGrad), &p.grad, full + stage, at.channel, 0, at.sample);
    tma_load(array(stage, kOut), &p.out, full + stage, at.channel, 0, at.sample);
  }

  // Returns the lse of this thread's row of a head; two threads share a row.
  __device__ float load_lse(int head) const {
    return head < p.all_heads ? p.lse[head * kTokens + static_cast<int>(threadIdx.x) / 2] : 0.0f;
  }

  // Writes the lse and delta of all rows of a head to shared memory; two threads share a row. dO
  // and out have the same swizzle, so the dot product can ignore the order of a row's chunks.
  __device__ void row_statistics(int stage, float lse) const {
    const int row = threadIdx.x / 2, half = threadIdx.x % 2;
    const auto* grad = reinterpret_cast<const Eight<T>*>(array(stage, kGrad)) + row * (kWidth / 8) +
                       half * (kWidth / 16);
    const auto* out = reinterpret_cast<const Eight<T>*>(array(stage, kOut)) + row * (kWidth / 8) +
                      half * (kWidth / 16);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      Eight<T> a, b;
      a.load(grad[i].at);
      b.load(out[i].at);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += wide(a.at[j]) * wide(b.at[j]);
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    if (half == 0) {
      lses[row] = lse * kLog2e;
      deltas[row] = sum;
    }
  }
};

// The work of a warpgroup: its 64 keys of a head, and one tile of dq.
template <class Traits>
struct BackwardConsumer {
  using T = typename Traits::T;
  using Block = BackwardBlock<Traits>;
  using Tile = typename Block::Tile;
  static constexpr int kWidth = Traits::kWidth, kTiles = Traits::kTiles,
                       kStepQueries = Traits::kStepQueries, kSteps = kWidth / 16;

  const Block& block;
  const int warpgroup;  // and index of its tile of keys, and of the queries whose dq it computes
  const float scale;
  float dk[kWidth / 2], dv[kWidth / 2];

  __device__ BackwardConsumer(const Block& of, int which)
      : block(of), warpgroup(which), scale(1 / sqrtf(static_cast<float>(kWidth))) {}

  // The shared-memory address of an array of a stage.
  __device__ uint32_t address(int stage, int which) const {
    return shared_address(block.array(stage, which));
  }

  // Starts sums = own * others^T. `own`: address of the warpgroup's rows of k or v; with kKeepsKeys
  // they come from `kept` instead. `others`: address of kStepQueries rows of q or dO.
  __device__ void product(float (&sums)[kStepQueries / 2], const uint32_t (&kept)[kSteps][4],
                          uint32_t own, uint32_t others) const {
    const uint64_t right = Tile::descriptor(others);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (Traits::kKeepsKeys) {
        WgmmaRegisters<T, false, kStepQueries>::run(sums, kept[k],
                                                    advance(right, k * Tile::kKMajorStep), k > 0);
      } else {
        Wgmma<T, false, false, kStepQueries>::run(
            sums, advance(Tile::descriptor(own), k * Tile::kKMajorStep),
            advance(right, k * Tile::kKMajorStep), k > 0);
      }
    }
    wgmma_commit();
  }

  // Computes and writes the gradients of a head. `count`: heads that the block has processed
  // before. `dqkv`: the head's first row of dq; rows are `stride` elements apart.
  __device__ void run(int stage, int count, T* dqkv, int stride) {
    const uint32_t q = address(stage, kQ), grad = address(stage, kGrad),
                   k = address(stage, kK) + warpgroup * kTileRows * Tile::kRowBytes,
                   v = address(stage, kV) + warpgroup * kTileRows * Tile::kRowBytes;
    uint32_t keys[kSteps][4], values[kSteps][4];
    if constexpr (Traits::kKeepsKeys) {
      load_left<kWidth>(keys, k, threadIdx.x / 32 % 4 * 16);
      load_left<kWidth>(values, v, threadIdx.x / 32 % 4 * 16);
    }
    const int channels = block.p.heads * kWidth;
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      const int use =
          count * kTiles + tile;  // tiles before this one, of all heads: gives slot and parity
      const int slot = use % Traits::kSlots;
      const uint32_t slot_rows = block.slot(slot);
      Barrier *const written = block.written + slot, *const read = block.read + slot;
#pragma unroll
      for (int first = 0; first < kTileRows; first += kStepQueries) {
        const int row = tile * kTileRows + first;  // of the head
        float s[kStepQueries / 2], dp[kStepQueries / 2];
        uint32_t weights[kStepQueries / 16][4], ds[kStepQueries / 16][4];
        wgmma_fence();
        product(s, keys, k, q + row * Tile::kRowBytes);
        product(dp, values, v, grad + row * Tile::kRowBytes);
        softmax_gradient(s, dp, weights, ds, row);
        wgmma_fence();
        const uint64_t right = Tile::descriptor(grad + row * Tile::kRowBytes),
                       right_q = Tile::descriptor(q + row * Tile::kRowBytes);
#pragma unroll
        for (int i = 0; i < kStepQueries / 16; ++i)
          WgmmaRegisters<T, true, kWidth>::run(dv, weights[i],
                                               advance(right, i * Tile::kMnMajorStep), row + i > 0);
#pragma unroll
        for (int i = 0; i < kStepQueries / 16; ++i)
          WgmmaRegisters<T, true, kWidth>::run(dk, ds[i], advance(right_q, i * Tile::kMnMajorStep),
                                               row + i > 0);
        wgmma_commit();
        if (first == 0) read->wait((use / Traits::kSlots & 1) ^ 1);
        store_ds(slot_rows, ds, first);
        wgmma_wait<0>();
        fence_accumulator(dk);
        fence_accumulator(dv);
      }
      fence_async_proxy();
      written->arrive();
      if (tile == warpgroup) {
        written->wait(use / Traits::kSlots & 1);
        float dq[kWidth / 2];
        compute_dq(dq, slot_rows, address(stage, kK));
        read->arrive();
        write_rows<kWidth>(dqkv + static_cast<int64_t>(tile * kTileRows) * stride, stride, dq,
                           scale, scale);
      }
    }
    T* const own = dqkv + static_cast<int64_t>(warpgroup * kTileRows) * stride;
    write_rows<kWidth>(own + kK * channels, stride, dk, scale, scale);
    write_rows<kWidth>(own + kV * channels, stride, dv, 1, 1);
  }

  // Waits for s and dp and turns them into the left operands p^T and ds^T. `row`: the first query.
  __device__ void softmax_gradient(float (&s)[kStepQueries / 2], float (&dp)[kStepQueries / 2],
                                   uint32_t (&weights)[kStepQueries / 16][4],
                                   uint32_t (&ds)[kStepQueries / 16][4], int row) const {
    const int first = row + static_cast<int>(threadIdx.x) % 4 * 2;
    const float scale2 = scale * kLog2e;
    wgmma_wait<1>();
    fence_accumulator(s);
#pragma unroll
    for (int j = 0; j < kStepQueries / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(block.lses + first + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = power_of_two(s[4 * j + i] * scale2 - (i % 2 ? lse.y : lse.x));
    }
    wgmma_wait<0>();
    fence_accumulator(dp);
#pragma unroll
    for (int j = 0; j < kStepQueries / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(block.deltas + first + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
    }
    left_from_accumulator<T, kStepQueries>(weights, s);
    left_from_accumulator<T, kStepQueries>(ds, dp);
  }

  // Stores ds^T of this warpgroup's keys and kStepQueries queries, from column `first` of a slot.
  __device__ void store_ds(uint32_t slot_rows, const uint32_t (&ds)[kStepQueries / 16][4],
                           int first) const {
    const int lane = threadIdx.x % 32,
              row = warpgroup * kTileRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kStepQueries / 16; ++i)
      stmatrix_x4<false>(HeadTile<64>::chunk(slot_rows, row, first / 8 + 2 * i + lane / 16), ds[i]);
  }

  // Computes dq = ds * k for the 64 queries of a slot, over all keys of the head.
  __device__ void compute_dq(float (&dq)[kWidth / 2], uint32_t slot_rows, uint32_t keys) const {
    const uint64_t left = HeadTile<64>::descriptor(slot_rows), right = Tile::descriptor(keys);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kTokens / 16; ++i)
      Wgmma<T, true, true, kWidth>::run(dq, advance(left, i * HeadTile<64>::kMnMajorStep),
                                        advance(right, i * Tile::kMnMajorStep), i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_accumulator(dq);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    hopper_attention_backward_kernel(const __grid_constant__ BackwardParameters p) {
#ifdef JAXUNET_SM90A_PASS
  using T = typename Traits::T;
  const BackwardBlock<Traits> block(p, shared_memory());
  if (threadIdx.x == 0) {
    block.init_barriers();
    fence_barrier_init();
    prefetch_tensor_map(&p.qkv);
    prefetch_tensor_map(&p.grad);
    prefetch_tensor_map(&p.out);
  }
  __syncthreads();
  constexpr int kAhead = Traits::kStages - 1;
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  BackwardConsumer<Traits> consumer(block, warpgroup);
  const int stride = 3 * p.heads * Traits::kWidth;
  float lse = block.load_lse(blockIdx.x);
  if (kAhead > 0 && threadIdx.x == 0) block.load(blockIdx.x, 0);
  int count = 0;
  for (int head = blockIdx.x; head < p.all_heads; head += gridDim.x, ++count) {
    __syncthreads();  // no warp reads the previous head
    const int ahead = head + kAhead * gridDim.x, stage = count % Traits::kStages;
    if (threadIdx.x == 0 && ahead < p.all_heads)
      block.load(ahead, (count + kAhead) % Traits::kStages);
    __syncwarp();
    const float own_lse = lse;
    lse = block.load_lse(head + gridDim.x);
    block.full[stage].wait(count / Traits::kStages & 1);
    block.row_statistics(stage, own_lse);
    __syncthreads();
    const Place at(head, p.heads, Traits::kWidth);
    T* const dqkv = static_cast<T*>(p.dqkv) +
                    static_cast<int64_t>(at.sample) * Traits::kTokens * stride + at.channel;
    consumer.run(stage, count, dqkv, stride);
  }
#else
  __trap();  // never launched: dispatch.cu
#endif
}

}  // namespace jaxunet::cuda::hopper_attention
