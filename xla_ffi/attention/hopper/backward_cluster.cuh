// Attention backward on Hopper for heads of 256 tokens and 256 channels. shapes.cuh dispatches. The
// formulas are those of flash_backward.cuh:
//   p = exp(s - lse),  dp = dO * v^T,  ds = p * (dp - delta),
//   dv = p^T * dO,  dk = ds^T * q / sqrt(width),  dq = ds * k / sqrt(width).
//
// A head's q, k, v and dO take 512 KiB, and its gradients in float32 as much as the registers of
// three multiprocessors. So a cluster of four blocks shares a head, one block on a multiprocessor.
// Block r owns 64 keys, 64 r and following, whose dk and dv it computes, and the queries of the
// same numbers, whose dq it computes. All queries are streamed past it in tiles of 64:
//
//                     tile of queries
//                     0      1      2      3
//     block 0, keys 0 ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys   0 to  63
//     block 1, keys 1 ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys  64 to 127
//     block 2, keys 2 ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys 128 to 191
//     block 3, keys 3 ds^T   ds^T   ds^T   ds^T  ->  dk, dv of keys 192 to 255
//                      |      |      |      |
//                      v      v      v      v
//     dq, by block     0      1      2      3        all keys of k are streamed for it
//
// Each block writes its part of a column to the shared memory of the block that computes the dq.
//
// dk and dv of 64 keys, 128 registers a thread each, belong to different warpgroups. Both products
// are transposed, so that their results are the left operands of the next ones. Each warpgroup
// computes s^T itself, six products instead of five, so that they need not wait for each other:
//
//     global memory            shared memory                      registers
//
//     own k, v       --TMA-->  k, v                    --->       values, warpgroup 0:
//     q, dO tiles    --TMA-->  ring of kStages tiles   --->         s^T = k * q^T -> p^T,
//     k tiles        --TMA-->    (the same ring)                    dv += p^T * dO
//       producer: warpgroup 2, one thread                         keys, warpgroup 1:
//                                                                   s^T -> p^T, dp^T = v * dO^T,
//                                                                   ds^T -> dk += ds^T * q
//     ds^T of the own queries, from all blocks <---------------------  |
//                              ds^T, k tiles           --->       dq, half of the channels each
//
// The items of the ring are q and dO of tile 0, of tile 1, ..., then the four tiles of k. All
// blocks of the cluster need each: block r loads chunk r of 64 channels, and multicasts it to all.
//
// Each sum is over one warpgroup's products in a fixed order, without atomics, so results are the
// same in every run.
//
// Shared memory: k, v, kStages items, [4 chunks of 64 channels][64 rows][128 bytes] each, swizzled;
// ds^T [256 keys][64 own queries], swizzled; lse (base two) and delta of all queries, float [256]
// each; barriers.
//
// Barriers (mbarrier). Parities alternate from 0; a wait for parity 1 passes at once in the first
// round. [s]: stage.
//
//     barrier   waits             arrives (arrivals)                      parity waited for
//     own[0, 1] consumers: k, v   producer (1 + bytes of the four boxes)  0
//     full[s]   consumers         producer (1 + bytes of the boxes that   0, flips when the ring
//                                 all blocks multicast)                   wraps
//     empty[s]  producer          each consumer warp of each block of     1, flips likewise
//                                 the cluster (8 x 4), after its last
//                                 product with the item
//
// Barriers of the cluster, in this order; all threads arrive at each. Only the consumers' arrivals
// at 2 and 3 have to order writes; the others are relaxed:
//     1  the barriers are initialized: other blocks may arrive, and write to this block.
//        fence_barrier_init orders the initialization.
//     2  delta of all queries is written, by each block for its own
//     3  ds^T is written
//     4  no block uses the shared memory of others any more, so they may exit
#pragma once

#include "attention/hopper/backward_cluster_block.cuh"

namespace jaxunet::cuda::hopper_attention {

// One consumer warpgroup. `sums`: dv of warpgroup 0, dk of warpgroup 1.
template <class T>
struct ClusterBackwardConsumer {
  using Traits = ClusterBackwardTraits<T>;
  using Block = ClusterBackwardBlock<T>;
  static constexpr int kTiles = Traits::kTiles, kWidth = Traits::kWidth;

  const Block& block;
  float sums[kWidth / 2];

  __device__ explicit ClusterBackwardConsumer(const Block& of) : block(of) {}

  __device__ uint32_t address(int bytes) const { return shared_address(block.shared + bytes); }

  // This warp no longer reads an item.
  __device__ void release(int item) const {
    const int lane = threadIdx.x % 32;
    if (lane < kTiles) arrive_peer(block.empty(item), lane);
  }

  // Barriers 1 and 2 of the cluster, without waiting for the second: writes the lse of all queries,
  // and sends the delta of the block's own ones to all blocks. Each warp computes 8 of them, 8
  // channels a lane.
  __device__ void begin() const {
    constexpr int kRows = kTileRows / (4 * Traits::kConsumers);  // of a warp
    const int lane = threadIdx.x % 32, row = block.rank * kTileRows + threadIdx.x / 32 * kRows;
    const int64_t first = static_cast<int64_t>(block.sample) * Traits::kTokens + row;
    const int stride = block.p.heads * kWidth, channel = block.sample_head * kWidth + 8 * lane;
    cluster_arrive_relaxed();  // 1
    float own = 0;
    Eight<T> out[kRows], grad[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t at = (first + i) * stride + channel;
      out[i].load(static_cast<const T*>(block.p.out) + at);
      grad[i].load(static_cast<const T*>(block.p.grad_elements) + at);
    }
    block.lses[threadIdx.x] =
        kLog2e * block.p.lse[(block.sample * block.p.heads + block.sample_head) *
                                 static_cast<int64_t>(Traits::kTokens) +
                             threadIdx.x];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float delta = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) delta += wide(out[i].at[j]) * wide(grad[i].at[j]);
#pragma unroll
      for (int offset = 16; offset; offset /= 2)
        delta += __shfl_xor_sync(0xffffffff, delta, offset);
      if (lane % kRows == i) own = delta;
    }
    static_assert(kRows * kTiles == 32, "a lane sends one delta to one block");
    cluster_wait();
    store_peer(peer_address(shared_address(block.deltas + row + lane % kRows), lane / kRows), own);
    cluster_arrive();  // 2
  }

  // Starts s = own * item^T, 16 channels at a time. `own`: bytes at which k or v begins.
  // Its descriptors are computed here: ahead of the loops, they would take too many registers.
  __device__ void product(float (&s)[kTileRows / 2], int own, int item) const {
    uint32_t owned = address(own), streamed = address(Block::place(item));
    asm volatile("" : "+r"(owned), "+r"(streamed));
    const uint64_t left = ChunkTile::descriptor(owned), right = ChunkTile::descriptor(streamed);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const int at = i / 4 * Traits::kChunkBytes + i % 4 * ChunkTile::kKMajorStep;
      Wgmma<T, false, false, kTileRows>::run(s, advance(left, at), advance(right, at), i > 0);
    }
    wgmma_commit();
  }

  // Starts sums += left * item, or sums = left * item without `add`.
  __device__ void accumulate(const uint32_t (&left)[kTileRows / 16][4], int item, bool add) {
    const uint64_t right =
        smem_descriptor(address(Block::place(item)), ChunkTile::kAtomBytes, Traits::kChunkBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileRows / 16; ++i) {
      WgmmaRegisters<T, true, kWidth>::run(
          sums, left[i], advance(right, i * ChunkTile::kMnMajorStep), add || i > 0);
    }
    wgmma_commit();
  }

  // Turns s^T to p^T; the columns are the queries of a tile.
  __device__ void weights(float (&s)[kTileRows / 2], int tile) const {
    const int first = tile * kTileRows + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTileRows / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(block.lses + first + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = power_of_two(s[4 * j + i] * kScale2<kWidth> - (i % 2 ? lse.y : lse.x));
    }
  }

  // Turns dp^T to ds^T.
  __device__ void weight_gradient(float (&dp)[kTileRows / 2], const float (&p)[kTileRows / 2],
                                  int tile) const {
    const int first = tile * kTileRows + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTileRows / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(block.deltas + first + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dp[4 * j + i] = p[4 * j + i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
    }
  }

  // Writes ds^T of a tile to the block that computes its dq: 64 keys, this block's, from row 64 *
  // rank, 16 bytes a thread and store.
  __device__ void send(const uint32_t (&ds)[kTileRows / 16][4], int tile) const {
    const int lane = threadIdx.x % 32,
              row = block.rank * kTileRows + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const uint32_t to = peer_address(address(Traits::kDs), tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {  // of 32 queries
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = ds[2 * group + i / 2][i % 2 * 2 + half];
        transpose_quad(words);
        store_peer(ChunkTile::chunk(to, row + 8 * half, 4 * group + lane % 4), words);
      }
    }
  }

  // Warpgroup 0: dv. The product s^T of the next tile is started behind that of dv.
  __device__ void values() {
    float s[kTileRows / 2];
    block.own[0].wait(0);
    block.wait_full(0);
    product(s, Traits::kOwnK, 0);
    cluster_wait();  // 2
#pragma unroll 1
    for (int tile = 0; tile < kTiles - 1; ++tile) {
      add_values(s, tile);
      block.wait_full(2 * tile + 2);
      product(s, Traits::kOwnK, 2 * tile + 2);
    }
    add_values(s, kTiles - 1);
    wgmma_wait<0>();
    fence_accumulator(sums);
    release(2 * kTiles - 1);
  }

  // Waits for s^T of a tile, and for dv of those before; starts its part of dv.
  __device__ void add_values(float (&s)[kTileRows / 2], int tile) {
    const int q = 2 * tile, grad = q + 1;
    uint32_t p[kTileRows / 16][4];
    wgmma_wait<0>();
    fence_accumulator(s);
    fence_accumulator(sums);
    release(q);
    if (tile > 0) release(grad - 2);
    weights(s, tile);
    left_from_accumulator<T, kTileRows>(p, s);
    block.wait_full(grad);
    accumulate(p, grad, tile > 0);
  }

  // Warpgroup 1: dk, and ds^T for dq. Behind dk, s^T of the next tile is started.
  __device__ void keys() {
    float s[kTileRows / 2];
    block.own[0].wait(0);
    block.wait_full(0);
    product(s, Traits::kOwnK, 0);
    block.own[1].wait(0);
    cluster_wait();  // 2
#pragma unroll 1
    for (int tile = 0; tile < kTiles - 1; ++tile) {
      add_keys(s, tile);
      block.wait_full(2 * tile + 2);
      product(s, Traits::kOwnK, 2 * tile + 2);
    }
    add_keys(s, kTiles - 1);
    fence_async_proxy_cluster();
    wgmma_wait<0>();
    fence_accumulator(sums);
    release(2 * kTiles - 2);
  }

  // Waits for s^T of a tile, and for dk of those before; starts its part of dk, and sends its ds^T.
  // p^T is computed while dp^T runs. q of the tile before is released as soon as its dk is done,
  // because its stage is the next one that the producer waits for.
  __device__ void add_keys(float (&s)[kTileRows / 2], int tile) {
    const int q = 2 * tile, grad = q + 1;
    float dp[kTileRows / 2];
    uint32_t ds[kTileRows / 16][4];
    if (tile > 0) {
      wgmma_wait<1>();
      release(q - 2);
    }
    wgmma_wait<0>();
    fence_accumulator(s);
    fence_accumulator(sums);
    block.wait_full(grad);
    product(dp, Traits::kOwnV, grad);
    weights(s, tile);
    wgmma_wait<0>();
    fence_accumulator(dp);
    release(grad);
    weight_gradient(dp, s, tile);
    left_from_accumulator<T, kTileRows>(ds, dp);
    accumulate(ds, q, tile > 0);
    send(ds, tile);
  }

  // dq of the block's own queries, half of the channels a warpgroup.
  __device__ void queries(float (&dq)[kWidth / 4], int half) const {
    constexpr int kStep = ChunkTile::kMnMajorStep, kSteps = kTileRows / 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int item = Traits::kFirstKeys + tile;
      const uint64_t left = ChunkTile::descriptor(address(Traits::kDs)),
                     right = smem_descriptor(
                         address(Block::place(item) + half * kWidth / 128 * Traits::kChunkBytes),
                         ChunkTile::kAtomBytes, Traits::kChunkBytes);
      block.wait_full(item);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma<T, true, true, kWidth / 2>::run(dq, advance(left, (kSteps * tile + i) * kStep),
                                              advance(right, i * kStep), tile + i > 0);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    fence_accumulator(dq);
  }

  __device__ void consume(int warpgroup) {
    constexpr float kScale = 0.0625f;  // 1 / sqrt(kWidth)
    begin();
    if (warpgroup == 0) {
      values();
    } else {
      keys();
    }
    cluster_arrive();  // 3
    const HeadRows<T> own = block.result(warpgroup == 0 ? kV : kK);
    const float scale = warpgroup == 0 ? 1.0f : kScale;
    write_rows<kWidth>(own.data, own.stride, sums, scale, scale);
    cluster_wait();
    fence_async_proxy();
    float dq[kWidth / 4];
    queries(dq, warpgroup);
    cluster_arrive_relaxed();  // 4; does not wait for dk and dv to be written
    const HeadRows<T> to = block.result(kQ);
    write_rows<kWidth / 2>(to.at(0, warpgroup * kWidth / 2), to.stride, dq, kScale, kScale);
    cluster_wait();
  }
};

template <class T>
__global__ void __launch_bounds__(ClusterBackwardTraits<T>::kThreads, 1)
    hopper_cluster_attention_backward_kernel(const __grid_constant__ ClusterBackwardParameters p) {
#ifdef JAXUNET_SM90A_PASS
  using Traits = ClusterBackwardTraits<T>;
  const ClusterBackwardBlock<T> block(p, shared_memory());
  if (threadIdx.x == 0) {
    block.init_barriers();
    fence_barrier_init();
  }
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == Traits::kConsumers) {
    set_registers<Traits::kProducerRegisters, false>();
    block.produce();
  } else {
    set_registers<Traits::kConsumerRegisters, true>();
    ClusterBackwardConsumer<T>(block).consume(warpgroup);
  }
#else
  __trap();  // the host does not launch it (dispatch.cu)
#endif
}

}  // namespace jaxunet::cuda::hopper_attention
