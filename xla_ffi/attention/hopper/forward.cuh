// Attention forward on Hopper for heads that fit in shared memory as a whole: 64 tokens and 32 or
// 64 channels, or 256 tokens and 32 channels. shapes.cuh dispatches; streaming.cuh takes larger
// heads.
//   out = softmax(q * k^T / sqrt(width)) * v, and the log-sum-exp of each row.
//
// A *tile* is 64 rows of q, k or v of one head. A block has two warpgroups, and each computes one
// tile of queries: two of the four tiles of a head of 256 tokens, or two heads of 64 tokens. Three
// blocks or more share a multiprocessor, so that one computes its softmax while others wait for
// their loads or wgmmas.
//
//     global memory             shared memory                 registers
//
//     qkv       ---TMA--->      tiles of q, k, v       --->   warpgroup 0, 1: a tile of queries
//               by thread 0,                                  for each tile of the head's keys:
//               all tiles                                       s = q * k^T     (wgmma)
//               at once                                         p = online softmax of s
//                                                               out += p * v    (wgmma; p is its
//     out, lse  <--------------------------------------         left operand, from registers)
//
// Barriers (mbarrier), one for each tile of keys, so that the first product starts before all keys
// have arrived:
//
//     barrier          waits                   arrives (arrivals)          parity waited for
//     full[kKeyTiles]  warpgroups of the head  thread 0 (1 + bytes below)  0: used once
//
// The bytes are those of tile i of k and of v; at the first barrier of a head, also those of its
// queries.
//
// Shared memory: tiles q [2], k [kKeyTiles], v [kKeyTiles], each [64][kWidth], swizzled; barriers.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/hopper/tile.cuh"
#include "attention/plan.h"
#include "common/fast_divmod.h"
#include "common/launch.cuh"
#include "common/tma.cuh"

namespace jaxunet::cuda::hopper_attention {

struct ForwardParameters {
  CUtensorMap qkv;  // boxes of a tile
  void* out;
  float* lse;
  int heads, all_heads;  // per sample; in the batch
  FastDivmod by_heads;
};

// The fastest options on an H200; to refit one, change it and run tools/gpu/harness/attn.
template <class T_, int kWidth_, int kTokens_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kWidth = kWidth_, kTokens = kTokens_;
  static constexpr int kBlocksPerSm = 3;  // at least; with four, ptxas would spill
  static constexpr int kWarpgroups = 2, kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kHeadTiles = kTokens / kTileRows;
  // In a block: tiles of queries per head, heads, and tiles of keys.
  static constexpr int kQueryTiles = std::min(kWarpgroups, kHeadTiles),
                       kBlockHeads = kWarpgroups / kQueryTiles,
                       kKeyTiles = kBlockHeads * kHeadTiles;
  static constexpr int kTileBytes = kTileRows * kWidth * 2,
                       kTilesBytes = (kWarpgroups + 2 * kKeyTiles) * kTileBytes;
  static constexpr int kBytes = kTilesBytes + kKeyTiles * 8;
};

// online_softmax and left_from_accumulator (tile.cuh) in one, 16 columns after the other, so that a
// number of s is dead once its weight is packed. Apart, they would need more registers than three
// blocks leave to a thread.
template <class T, int kColumns>
__device__ inline void online_softmax_packed(uint32_t (&weights)[kColumns / 16][4],
                                             const float (&s)[kColumns / 2], float scale2,
                                             float (&max)[2], float (&sum)[2],
                                             float (&rescale)[2]) {
  float base[2], part[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    base[half] = raise_max<kColumns>(s, half, scale2, max[half], rescale[half]);
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2, at = 8 * k + 2 * i;
      const float first = power_of_two(s[at] * scale2 - base[half]),
                  second = power_of_two(s[at + 1] * scale2 - base[half]);
      part[half] += first;
      part[half] += second;
      weights[k][i] = pack(first, second, T());
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] = sum[half] * rescale[half] + part[half];
}

template <class Traits>
struct ForwardBlock {
  using T = typename Traits::T;
  using Tile = HeadTile<Traits::kWidth>;
  static constexpr int kWidth = Traits::kWidth, kTokens = Traits::kTokens,
                       kHeadTiles = Traits::kHeadTiles, kTileBytes = Traits::kTileBytes;

  const ForwardParameters& p;
  unsigned char *const q, *const k, *const v;  // tiles in shared memory
  Barrier* const full;
  const int first;  // the block's first tile of queries, among those of all heads

  __device__ ForwardBlock(const ForwardParameters& parameters, unsigned char* memory)
      : p(parameters),
        q(memory),
        k(q + Traits::kWarpgroups * kTileBytes),
        v(k + Traits::kKeyTiles * kTileBytes),
        full(reinterpret_cast<Barrier*>(memory + Traits::kTilesBytes)),
        first(blockIdx.x * Traits::kWarpgroups) {}

  // One thread: starts all loads. The last block may have fewer heads.
  __device__ void load() const {
    for (int i = 0; i < Traits::kBlockHeads; ++i) {
      const int head = first / kHeadTiles + i;
      if (head >= p.all_heads) return;
      const Place at(head, p.by_heads, kWidth);
      Barrier* barrier = full + i * kHeadTiles;
      const auto load_tile = [&](unsigned char* to, Qkv which, int tile) {
        tma_load(to, &p.qkv, barrier, at.channel + which * p.heads * kWidth, tile * kTileRows,
                 at.sample);
      };
      barrier->arrive_expect((Traits::kQueryTiles + 2) * kTileBytes);
#pragma unroll
      for (int tile = 0; tile < Traits::kQueryTiles; ++tile)
        load_tile(q + (i + tile) * kTileBytes, kQ, first % kHeadTiles + tile);
#pragma unroll 1
      for (int tile = 0; tile < kHeadTiles; ++tile, ++barrier) {
        if (tile > 0) barrier->arrive_expect(2 * kTileBytes);
        const int offset = (i * kHeadTiles + tile) * kTileBytes;
        load_tile(k + offset, kK, tile);
        load_tile(v + offset, kV, tile);
      }
    }
  }

  // Starts s = queries * keys^T, whose tiles are at these addresses.
  static __device__ void start_logits(float (&s)[kTileRows / 2], uint32_t queries, uint32_t keys) {
    const uint64_t left = Tile::descriptor(queries), right = Tile::descriptor(keys);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      Wgmma<T, false, false, kTileRows>::run(s, advance(left, step * Tile::kKMajorStep),
                                             advance(right, step * Tile::kKMajorStep), step > 0);
    }
    wgmma_commit();
  }

  // Starts out += weights * values, whose tile is at this address.
  static __device__ void start_out(float (&out)[kWidth / 2],
                                   const uint32_t (&weights)[kTileRows / 16][4], uint32_t values) {
    const uint64_t right = Tile::descriptor(values);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileRows / 16; ++step) {
      WgmmaRegisters<T, true, kWidth>::run(out, weights[step],
                                           advance(right, step * Tile::kMnMajorStep), true);
    }
    wgmma_commit();
  }

  // One warpgroup: computes its tile of queries.
  __device__ void compute(int warpgroup) const {
    const int tile = first + warpgroup, head = tile / kHeadTiles,
              key_tile = warpgroup / Traits::kQueryTiles * kHeadTiles;
    if (head >= p.all_heads) return;
    float out[kWidth / 2], max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) out[i] = 0;
#pragma unroll 1
    for (int i = key_tile; i < key_tile + kHeadTiles; ++i) {
      float s[kTileRows / 2], rescale[2];
      uint32_t weights[kTileRows / 16][4];
      full[i].wait(0);
      start_logits(s, shared_address(q + warpgroup * kTileBytes),
                   shared_address(k + i * kTileBytes));
      wgmma_wait<0>();
      fence_accumulator(s);
      online_softmax_packed<T, kTileRows>(weights, s, kScale2<kWidth>, max, sum, rescale);
      scale_rows(out, rescale);
      start_out(out, weights, shared_address(v + i * kTileBytes));
      wgmma_wait<0>();  // here and not a step later, so that s and weights can share registers
      fence_accumulator(out);
    }
    write(out, max, sum, head, tile % kHeadTiles * kTileRows);
  }

  // Divides by the sums, and writes 64 rows of the output and their log-sum-exp. The sums are 1 to
  // kTokens, so the approximations are accurate to 22 bits (1 / sum) and about 1e-6 (logarithm):
  // far below the rounding of out and of the weights in the backward pass.
  __device__ void write(const float (&out)[kWidth / 2], const float (&max)[2], float (&sum)[2],
                        int head, int row) const {
    write_lse(p.lse + static_cast<int64_t>(head) * kTokens + row, max, sum,
              [](float max, float sum) { return (max * kScale2<kWidth> + __log2f(sum)) * kLn2; });
    const int stride = p.heads * kWidth;
    const Place at(head, p.by_heads, kWidth);
    T* const to = static_cast<T*>(p.out) +
                  (static_cast<int64_t>(at.sample) * kTokens + row) * stride + at.channel;
    write_rows<kWidth>(to, stride, out, reciprocal(sum[0]), reciprocal(sum[1]));
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    hopper_attention_forward_kernel(const __grid_constant__ ForwardParameters p) {
#ifdef JAXUNET_SM90A_PASS
  const ForwardBlock<Traits> block(p, shared_memory());
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.qkv);
    for (int i = 0; i < Traits::kKeyTiles; ++i) block.full[i].init(1);
    fence_barrier_init();
    block.load();
  }
  __syncthreads();
  // The same in all lanes, so that the compiler keeps addresses in uniform registers.
  block.compute(__shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0));
#else
  __trap();  // never launched: dispatch.cu
#endif
}

}  // namespace jaxunet::cuda::hopper_attention
