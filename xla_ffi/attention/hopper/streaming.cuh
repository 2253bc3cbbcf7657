// Attention on Hopper, forward and backward, for heads that stream through shared memory: 64 or 256
// channels and a multiple of 128 tokens. flash_backward.cuh has the formulas; shapes.cuh
// dispatches.
//
// A kernel does one job (Role). Its blocks *own* rows of a head, queries or keys, whose results
// they compute; all rows of the other kind are *streamed* through shared memory in tiles of
// kStreamRows. a and b are the owned rows, c and d the streamed rows (factors left out):
//
//   role         a  b    c  d    products                          results
//   forward      q       k  v    s   = a * c^T                     out = softmax(s) * d
//   queries      q  dO   k  v    s   = a * c^T,  dp   = b * d^T    dq = ds * c
//   keys         k  v    q  dO   s^T = a * c^T,  dp^T = b * d^T    dk = ds^T * c
//   values       k       q  dO   s^T = a * c^T                     dv = p^T * d
//   keys_values  k  v    q  dO   s^T = a * c^T,  dp^T = b * d^T    dk = ds^T * c,  dv = p^T * d
//
// For 256 channels, dk and dv are separate jobs: the two accumulators, each 64 rows of 256 channels
// in float32, would together take all of a thread's registers.
//
// The backward pass is three launches. The first stores delta, the sum of dO * out over each row,
// in the first four bytes of rows of dqkv that a later launch overwrites:
// - 256 channels: queries, which stores delta in dv; keys; values.
// - 64 channels: flash_delta_kernel, which stores delta in dq; keys_values; queries, which computes
//   delta itself.
//
// A *unit* is 128 owned rows, 64 for each of two consumer warpgroups. Blocks are persistent, one
// per multiprocessor, and process one unit after another:
//
//     global memory            shared memory                      registers
//
//     owned rows     --TMA-->  a, b: one unit             --->    consumer 0, 1 = warpgroup:
//     streamed rows  --TMA-->  c: ring of kStagesC tiles  --->    products, softmax; results
//                              d: ring of kStagesD tiles  --->      |
//       producer: warpgroup 2, one thread                           |
//     lse, delta     ------->  of all queries, if keys    --->      |
//                              are owned (the consumers             |
//                              copy them)                           v
//     results        <----------------------------------------------+
//
// Shared memory: a, b [2 consumers][64 rows], c [kStagesC], d [kStagesD][kStreamRows], each
// [chunks of 64 channels][rows][128 bytes], swizzled; lse in base two and delta of all queries, if
// keys are owned, float [kMaxTokens] each; barriers.
//
// Barriers (mbarrier), a pair for each of a, b, c[s] and d[s]. Parities alternate from 0; a wait
// for parity 1 returns at once in the first round.
//
//     barrier  waits      arrives (arrivals)                  parity waited for
//     full     consumers  producer (1 + bytes of the boxes)   0, flips when the ring wraps (a, b:
//                                                             every unit)
//     empty    producer   lane 0 of each consumer warp (8),   1, flips likewise
//                         after its last product with it
//
// Named barrier 1, the 256 consumer threads: first, no warp still reads the lse and delta of the
// previous unit; then, those of this unit have been written.
#pragma once

#include <cmath>

#include "attention/hopper/streaming_block.cuh"

namespace jaxunet::cuda::hopper_attention {

// Registers per thread after setmaxnreg: 128 x 40 + 256 x 232 = 64,512, as many as 384 threads of
// 168 have at launch.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// One consumer warpgroup.
template <class Traits>
struct StreamingConsumer {
  using T = typename Traits::T;
  using Block = StreamingBlock<Traits>;
  static constexpr Role kRole = Traits::kRole;
  static constexpr int kWidth = Traits::kWidth, kStreamRows = Traits::kStreamRows;

  const Block& block;
  const int warpgroup;
  float accumulator[kWidth / 2];  // the result: out, dq, dk or dv; with kKeysValues dk
  float dv[kRole == Role::kKeysValues ? kWidth / 2 : 1];
  float max[2], sum[2];            // forward
  float row_lse[2], row_delta[2];  // for owned queries

  __device__ StreamingConsumer(const Block& of, int which) : block(of), warpgroup(which) {}

  static __device__ bool is_lane(int lane) { return threadIdx.x % 32 == lane; }
  static __device__ void release(const Buffer& buffer) {
    if (is_lane(0)) buffer.empty->arrive();
  }

  __device__ uint32_t address(int bytes) const { return shared_address(block.shared + bytes); }

  // Starts s = own * other^T, 16 channels at a time. `own`, `other`: byte offsets of the tiles.
  __device__ void product(float (&s)[kStreamRows / 2], int own, int other) const {
    const uint64_t left = ChunkTile::descriptor(address(own)),
                   right = ChunkTile::descriptor(address(other));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const int chunk = i / 4, step = i % 4 * ChunkTile::kKMajorStep;
      Wgmma<T, false, false, kStreamRows>::run(
          s, advance(left, chunk * Traits::kTileChunkBytes + step),
          advance(right, chunk * Traits::kStreamChunkBytes + step), i > 0);
    }
    wgmma_commit();
  }

  // Starts `to` += weights * other, or `to` = weights * other without `add`. `other`: a tile's
  // address.
  static __device__ void accumulate(float (&to)[kWidth / 2],
                                    const uint32_t (&weights)[kStreamRows / 16][4], uint32_t other,
                                    bool add) {
    const uint64_t right = smem_descriptor(other, ChunkTile::kAtomBytes, Traits::kStreamChunkBytes);
#pragma unroll
    for (int i = 0; i < kStreamRows / 16; ++i)
      WgmmaRegisters<T, true, kWidth>::run(
          to, weights[i], advance(right, i * ChunkTile::kMnMajorStep), add || i > 0);
  }

  // Backward: waits for the products, turns s into p = exp(s - lse) and, if the role has dp, turns
  // dp into ds = p * (dp - delta). `row`: the first streamed row.
  __device__ void softmax_gradient(float (&s)[kStreamRows / 2], float (&dp)[kStreamRows / 2],
                                   int row) const {
    const int column = row + static_cast<int>(threadIdx.x) % 4 * 2;
    wgmma_wait<Traits::kHasDp ? 1 : 0>();
    fence_accumulator(s);
#pragma unroll
    for (int j = 0; j < kStreamRows / 8; ++j) {
      float2 lse;
      if constexpr (Traits::kColumnStatistics)
        lse = *reinterpret_cast<const float2*>(block.lses + column + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float at = Traits::kColumnStatistics ? (i % 2 ? lse.y : lse.x) : row_lse[i / 2];
        s[4 * j + i] = power_of_two(s[4 * j + i] * kScale2<kWidth> - at);
      }
    }
    if constexpr (Traits::kHasDp) {
      wgmma_wait<0>();
      fence_accumulator(dp);
#pragma unroll
      for (int j = 0; j < kStreamRows / 8; ++j) {
        float2 delta;
        if constexpr (Traits::kColumnStatistics)
          delta = *reinterpret_cast<const float2*>(block.deltas + column + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float at =
              Traits::kColumnStatistics ? (i % 2 ? delta.y : delta.x) : row_delta[i / 2];
          dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - at);
        }
      }
    }
  }

  // Sets row_lse and row_delta of the owned queries, after b has arrived. Each warp computes the
  // deltas of its own 16 rows, 8 channels per lane.
  __device__ void load_owned_statistics(int head, int row) {
    const StreamingParameters& p = block.p;
    const Place place(head, p.heads, kWidth);
    const HeadRows<const T> out{
        static_cast<const T*>(p.out) +
            static_cast<int64_t>(place.sample) * p.tokens * p.heads * kWidth + place.channel,
        p.heads * kWidth, p.tokens, kWidth};
    const HeadRows<T> deltas = result(head, Traits::kDeltaArray);
    constexpr int kLanes = kWidth / 8, kRows = 32 / kLanes;  // per row; per pass of a warp
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16, part = lane % kLanes;
    const uint32_t grad =
        Traits::kB + warpgroup * Traits::kTileBytes + part / 8 * Traits::kTileChunkBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 4
      for (int i = 0; i < 8; i += kRows) {
        const int tile_row = first + 8 * half + i + lane / kLanes;
        Eight<T> x, y;
        x.load(out.at(row + tile_row, 8 * part));
        y.load(
            reinterpret_cast<const T*>(block.shared + ChunkTile::chunk(grad, tile_row, part % 8)));
        float delta = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) delta += wide(x.at[j]) * wide(y.at[j]);
#pragma unroll
        for (int offset = kLanes / 2; offset; offset /= 2)
          delta += __shfl_xor_sync(0xffffffff, delta, offset);
        if (Traits::kWritesDeltas && part == 0)
          *reinterpret_cast<float*>(deltas.at(row + tile_row, 0)) = delta;
        const float own = __shfl_sync(0xffffffff, delta, lane / 4 % kRows * kLanes);
        if (lane / 4 / kRows == i / kRows) row_delta[half] = own;
      }
      row_lse[half] =
          kLog2e * p.lse[static_cast<int64_t>(head) * p.tokens + row + first + lane / 4 + 8 * half];
    }
  }

  // Copies the lse and delta of all queries to shared memory. `delta_rows`: the rows of dqkv in
  // which an earlier launch wrote the deltas.
  __device__ void load_streamed_statistics(int head, const HeadRows<T>& delta_rows) const {
    named_barrier_sync(1, Traits::kConsumers * kWarpgroup);  // no warp reads the previous unit
    for (int row = threadIdx.x; row < block.p.tokens; row += Traits::kConsumers * kWarpgroup) {
      block.lses[row] = kLog2e * block.p.lse[static_cast<int64_t>(head) * block.p.tokens + row];
      if (Traits::kHasDp)
        block.deltas[row] = *reinterpret_cast<const float*>(delta_rows.at(row, 0));
    }
    named_barrier_sync(1, Traits::kConsumers * kWarpgroup);
  }

  // Processes all units of the block.
  __device__ void consume() {
    const StreamingParameters& p = block.p;
    const int head_units = p.tokens / Traits::kUnitRows, tiles = p.tokens / kStreamRows;
    int count = 0, stream = 0;
    for (int unit = blockIdx.x; unit < p.units; unit += gridDim.x, ++count) {
      const int head = unit / head_units,
                row = unit % head_units * Traits::kUnitRows + warpgroup * kTileRows;
      begin(head, row, count & 1);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile, ++stream) step(tile, stream, tile == tiles - 1);
      write(head, row);
    }
  }

  // A head's rows of an array of dqkv, or of out.
  __device__ HeadRows<T> result(int head, Qkv which) const {
    const StreamingParameters& p = block.p;
    constexpr int kArrays = Traits::kBackward ? 3 : 1;
    const Place at(head, p.heads, kWidth);
    T* const data =
        static_cast<T*>(p.result) +
        (static_cast<int64_t>(at.sample) * p.tokens * kArrays + which) * p.heads * kWidth +
        at.channel;
    return {data, kArrays * p.heads * kWidth, p.tokens, kWidth};
  }

  // Called before the first tile of a unit. `parity`: for the barriers of a and b.
  __device__ void begin(int head, int row, int parity) {
    if constexpr (Traits::kColumnStatistics)
      load_streamed_statistics(head, result(head, Traits::kDeltaArray));
    if constexpr (!Traits::kBackward) {
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) accumulator[i] = 0;
      max[0] = max[1] = -INFINITY;
      sum[0] = sum[1] = 0;
    }
    block.a().full->wait(parity);
    if constexpr (Traits::kHasDp) block.b().full->wait(parity);
    if constexpr (kRole == Role::kQueries) load_owned_statistics(head, row);
  }

  // Adds a streamed tile to the results. `stream`: number of tiles streamed before, over all units.
  // Releases each buffer after its last product.
  __device__ void step(int tile, int stream, bool last) {
    const int stage_c = stream % Traits::kStagesC, stage_d = stream % Traits::kStagesD,
              at_c = Traits::kC + stage_c * Traits::kStreamBytes,
              at_d = Traits::kD + stage_d * Traits::kStreamBytes;
    const Buffer c = block.c(stage_c), d = block.d(stage_d);
    const int parity_d = stream / Traits::kStagesD & 1;
    // True if a result is a product with c (dq, dk), or with d (out, dv).
    constexpr bool kOfC = Traits::kHasDp, kOfD = !kOfC || kRole == Role::kKeysValues;
    float s[kStreamRows / 2], dp[kStreamRows / 2];
    c.full->wait(stream / Traits::kStagesC & 1);
    product(s, warpgroup * Traits::kTileBytes, at_c);
    if constexpr (Traits::kHasDp) {
      d.full->wait(parity_d);
      product(dp, Traits::kB + warpgroup * Traits::kTileBytes, at_d);
    }
    if constexpr (Traits::kBackward) {
      softmax_gradient(s, dp, tile * kStreamRows);
    } else {
      float rescale[2];
      wgmma_wait<0>();
      fence_accumulator(s);
      online_softmax<kStreamRows>(s, kScale2<kWidth>, max, sum, rescale);
      scale_rows(accumulator, rescale);
    }
    if (last) release(block.a());
    if (last && Traits::kHasDp) release(block.b());
    if (!kOfC) release(c);
    if (!kOfD) release(d);
    if constexpr (!Traits::kHasDp) d.full->wait(parity_d);
    uint32_t p_left[kStreamRows / 16][4], ds_left[kStreamRows / 16][4];
    if constexpr (kOfD) left_from_accumulator<T, kStreamRows>(p_left, s);
    if constexpr (kOfC) left_from_accumulator<T, kStreamRows>(ds_left, dp);
    wgmma_fence();
    if constexpr (kRole == Role::kKeysValues) {
      accumulate(dv, p_left, address(at_d), tile > 0);
    } else if constexpr (kOfD) {
      accumulate(accumulator, p_left, address(at_d), !Traits::kBackward || tile > 0);
    }
    if constexpr (kOfC) accumulate(accumulator, ds_left, address(at_c), tile > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_accumulator(accumulator);
    if constexpr (kRole == Role::kKeysValues) fence_accumulator(dv);
    if (kOfC) release(c);
    if (kOfD) release(d);
  }

  // Scales and writes the results of a unit.
  __device__ void write(int head, int row) {
    constexpr Qkv kResult = kRole == Role::kKeys || kRole == Role::kKeysValues ? kK
                            : kRole == Role::kValues                           ? kV
                                                                               : kQ;
    float factor[2] = {1, 1};
    if constexpr (kRole == Role::kForward) {
      write_lse(block.p.lse + static_cast<int64_t>(head) * block.p.tokens + row, max, sum,
                [](float max, float sum) { return (max * kScale2<kWidth> + log2f(sum)) / kLog2e; });
      factor[0] = 1 / sum[0];
      factor[1] = 1 / sum[1];
    } else if constexpr (Traits::kHasDp) {
      factor[0] = factor[1] = kWidth == 64 ? 0.125f : 0.0625f;  // 1 / sqrt(kWidth)
    }
    const HeadRows<T> to = result(head, kResult);
    write_rows<kWidth>(to.at(row, 0), to.stride, accumulator, factor[0], factor[1]);
    if constexpr (kRole == Role::kKeysValues) {
      const HeadRows<T> values = result(head, kV);
      write_rows<kWidth>(values.at(row, 0), values.stride, dv, 1, 1);
    }
  }
};

template <class Traits>
__device__ __forceinline__ void run_streaming_block(const StreamingParameters& p) {
#ifdef JAXUNET_SM90A_PASS
  const StreamingBlock<Traits> block(p, shared_memory());
  if (threadIdx.x == 0) {
    block.init_barriers();
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == Traits::kConsumers) {
    set_registers<kProducerRegisters, false>();
    if (threadIdx.x % kWarpgroup == 0) block.produce();
  } else {
    set_registers<kConsumerRegisters, true>();
    StreamingConsumer<Traits>(block, warpgroup).consume();
  }
#else
  __trap();  // never launched: dispatch.cu
#endif
}

// Two kernel names, so that profiles tell the passes apart.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    hopper_streaming_attention_forward_kernel(const __grid_constant__ StreamingParameters p) {
  run_streaming_block<Traits>(p);
}
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    hopper_streaming_attention_backward_kernel(const __grid_constant__ StreamingParameters p) {
  run_streaming_block<Traits>(p);
}

}  // namespace jaxunet::cuda::hopper_attention
