// Shared by all warpgroups of a block of the cluster kernel: its head and rank, the shared-memory
// map, the barriers; and the producer. backward_cluster.cuh describes them.
#pragma once

#include "attention/hopper/streaming_block.cuh"
#include "common/cluster.cuh"

namespace jaxunet::cuda::hopper_attention {

struct ClusterBackwardParameters {
  CUtensorMap qkv, grad;            // boxes of 64 rows of a chunk of 64 channels
  const void *out, *grad_elements;  // grad_elements: the array of `grad`
  const float* lse;
  void* dqkv;
  int heads;  // of a sample
};

template <class T_>
struct ClusterBackwardTraits {
  using T = T_;
  static constexpr int kWidth = 256, kTokens = 256, kChunks = kWidth / 64;
  static constexpr int kTiles = kTokens / kTileRows;  // and the blocks of a cluster
  static_assert(kTiles == kChunks, "each block loads one chunk of an item for all blocks");
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
  // Registers of a thread after the warpgroups have divided what 384 threads of 168 have at the
  // launch: 128 x 40 + 256 x 232 = 64,512.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kStages = 4;
  static constexpr int kFirstKeys = 2 * kTiles, kItems = kFirstKeys + kTiles;
  // Bytes at which the parts of shared memory begin, and of tiles.
  static constexpr int kChunkBytes = kTileRows * ChunkTile::kRowBytes,
                       kTileBytes = kChunks * kChunkBytes;
  static constexpr int kOwnK = 0, kOwnV = kTileBytes, kRing = 2 * kTileBytes,
                       kDs = kRing + kStages * kTileBytes,
                       kStatistics = kDs + kTokens * ChunkTile::kRowBytes,
                       kBarriers = kStatistics + 2 * kTokens * 4,
                       kBytes = kBarriers + (2 + 2 * kStages) * 8;
};

template <class T_>
struct ClusterBackwardBlock {
  using T = T_;
  using Traits = ClusterBackwardTraits<T>;

  const ClusterBackwardParameters& p;
  unsigned char* const shared;
  float *lses, *deltas;
  Barrier *own, *fulls, *empties;
  int rank, sample, sample_head;  // of the block in its cluster; of its head

  __device__ ClusterBackwardBlock(const ClusterBackwardParameters& parameters,
                                  unsigned char* memory)
      : p(parameters), shared(memory) {
    lses = reinterpret_cast<float*>(shared + Traits::kStatistics);
    deltas = lses + Traits::kTokens;
    own = reinterpret_cast<Barrier*>(shared + Traits::kBarriers);
    fulls = own + 2;
    empties = fulls + Traits::kStages;
    rank = static_cast<int>(blockIdx.x) % Traits::kTiles;
    const int head = static_cast<int>(blockIdx.x) / Traits::kTiles;
    sample = head / p.heads;
    sample_head = head - sample * p.heads;
  }

  __device__ void init_barriers() const {
    own[0].init(1);
    own[1].init(1);
    for (int i = 0; i < Traits::kStages; ++i) {
      fulls[i].init(1);
      empties[i].init(4 * Traits::kConsumers * Traits::kTiles);
    }
  }

  // Bytes at which an item lies, and its barriers.
  static __device__ int place(int item) {
    return Traits::kRing + item % Traits::kStages * Traits::kTileBytes;
  }
  __device__ Barrier* full(int item) const { return fulls + item % Traits::kStages; }
  __device__ Barrier* empty(int item) const { return empties + item % Traits::kStages; }
  __device__ void wait_full(int item) const { full(item)->wait(item / Traits::kStages & 1); }

  // The coordinate of a chunk of an array (Qkv or kGrad) of the head.
  __device__ int chunk(int which, int index) const {
    return (which < kGrad ? which * p.heads + sample_head : sample_head) * Traits::kChunks + index;
  }

  // The producer, one thread: loads the block's own rows of k or v.
  __device__ void load_own(int which) const {
    Barrier* const barrier = own + (which - kK);
    unsigned char* const to = shared + (which == kK ? Traits::kOwnK : Traits::kOwnV);
    barrier->arrive_expect(Traits::kTileBytes);
    for (int i = 0; i < Traits::kChunks; ++i) {
      tma_load(to + i * Traits::kChunkBytes, &p.qkv, barrier, 0, rank * kTileRows, chunk(which, i),
               sample);
    }
  }

  // The producer: loads the block's chunk of an item, for all blocks. The barrier that it waits for
  // says that all of them have read what was there before.
  __device__ void load(int item) const {
    const bool keys = item >= Traits::kFirstKeys;
    const int which = keys            ? int{kK}
                      : item % 2 != 0 ? int{kGrad}
                                      : int{kQ},
              tile = keys ? item - Traits::kFirstKeys : item / 2;
    empty(item)->wait((item / Traits::kStages & 1) ^ 1);
    full(item)->arrive_expect(Traits::kTileBytes);
    tma_load_multicast(shared + place(item) + rank * Traits::kChunkBytes,
                       which < kGrad ? &p.qkv : &p.grad, full(item), 0, tile * kTileRows,
                       chunk(which, rank), sample, (1 << Traits::kTiles) - 1);
  }

  // The producer warpgroup. Its other threads only arrive at the barriers of the cluster. Their
  // arrivals are relaxed, as the producer writes only by TMA, which full[s] orders.
  __device__ void produce() const {
    const bool leader = threadIdx.x % kWarpgroup == 0;
    cluster_arrive_relaxed();  // 1
    cluster_wait();
    if (leader) {
      load_own(kK);
      load(0);
      load_own(kV);
      for (int item = 1; item < Traits::kStages; ++item) load(item);
    }
    __syncwarp();
    cluster_arrive_relaxed();  // 2
    cluster_wait();
    cluster_arrive_relaxed();  // 3; early, as consumers of other blocks wait for it
    if (leader) {
      for (int item = Traits::kStages; item < Traits::kItems; ++item) load(item);
    }
    __syncwarp();
    cluster_wait();
    cluster_arrive_relaxed();  // 4
    cluster_wait();
  }

  // The block's rows of an array of dqkv.
  __device__ HeadRows<T> result(Qkv which) const {
    const int channels = p.heads * Traits::kWidth;
    T* const data =
        static_cast<T*>(p.dqkv) +
        (static_cast<int64_t>(sample) * Traits::kTokens + rank * kTileRows) * 3 * channels +
        which * channels + sample_head * Traits::kWidth;
    return {data, 3 * channels, kTileRows, Traits::kWidth};
  }
};

}  // namespace jaxunet::cuda::hopper_attention
