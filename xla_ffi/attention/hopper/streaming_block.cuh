// What all warpgroups of a block of the streaming kernels share: roles, tile sizes, the
// shared-memory map, the barriers; and the producer. streaming.cuh describes them.
#pragma once

#include "attention/hopper/tile.cuh"
#include "common/launch.cuh"
#include "common/tma.cuh"

namespace jaxunet::cuda::hopper_attention {

// The jobs of streaming.cuh's table.
enum class Role { kForward, kQueries, kKeys, kValues, kKeysValues };

struct StreamingParameters {
  CUtensorMap qkv, grad;  // boxes of 64 rows of a head
  const void* out;        // backward: the forward's output
  float* lse;             // written by the forward
  void* result;           // out or dqkv
  int heads, tokens;      // heads of a sample; tokens of a head
  int units;              // of all heads
};

template <class T_, int kWidth_, Role kRole_>
struct StreamingTraits {
  using T = T_;
  static constexpr Role kRole = kRole_;
  static constexpr int kWidth = kWidth_, kChunks = kWidth / 64, kConsumers = 2,
                       kThreads = (kConsumers + 1) * kWarpgroup, kUnitRows = kConsumers * kTileRows,
                       kStreamRows = kWidth == 64 ? 128 : 64;
  // Tokens of a head, at most, in the backward pass: lse and delta of all queries take 8 bytes of
  // shared memory each. With 256 channels the tiles leave no room for more.
  static constexpr int kMostTokens = kWidth == 64 ? 4096 : 256;
  static constexpr bool kBackward = kRole != Role::kForward;
  static constexpr bool kSecond = kBackward && kRole != Role::kValues;  // has b and dp
  // Keys are owned, so queries, with their lse and delta, are the columns of the products.
  static constexpr bool kColumnStatistics = kBackward && kRole != Role::kQueries;
  static constexpr bool kLeavesDeltas = kRole == Role::kQueries && kWidth == 256;
  static constexpr int kDeltaArray = kWidth == 256 ? 2 : 0;  // where deltas pass: dv (2) or dq (0)
  static_assert(kStreamRows == kTileRows || kChunks == 1);
  static constexpr int kTileBytes = kTileRows * kWidth * 2, kStreamBytes = kStreamRows * kWidth * 2;
  static constexpr int kSlotsC = 2, kSlotsD = kSecond && kWidth == 256 ? 1 : 2;
  // Bytes at which b, c and d begin and the tiles end.
  static constexpr int kB = kConsumers * kTileBytes, kC = kB + (kSecond ? kB : 0),
                       kD = kC + kSlotsC * kStreamBytes, kTilesEnd = kD + kSlotsD * kStreamBytes;
  static constexpr int kStatisticsBytes = kColumnStatistics ? 2 * kMostTokens * 4 : 0;
  static constexpr int kBarriers = 2 * (2 + kSlotsC + kSlotsD);
  static constexpr int kBytes = kTilesEnd + kStatisticsBytes + kBarriers * 8;
};

// The barriers of a buffer: a, b, or a slot of c or d.
struct Buffer {
  Barrier *full, *empty;
};

template <class Traits>
struct StreamingBlock {
  using T = typename Traits::T;
  static constexpr Role kRole = Traits::kRole;

  const StreamingParameters& p;
  unsigned char* const shared;
  float *lses, *deltas;
  Barrier* barriers;

  __device__ StreamingBlock(const StreamingParameters& parameters, unsigned char* memory)
      : p(parameters), shared(memory) {
    lses = reinterpret_cast<float*>(shared + Traits::kTilesEnd);
    deltas = lses + Traits::kMostTokens;
    barriers = reinterpret_cast<Barrier*>(shared + Traits::kTilesEnd + Traits::kStatisticsBytes);
  }
  __device__ Buffer a() const { return {barriers, barriers + 1}; }
  __device__ Buffer b() const { return {barriers + 2, barriers + 3}; }
  __device__ Buffer c(int slot) const { return {barriers + 4 + 2 * slot, barriers + 5 + 2 * slot}; }
  __device__ Buffer d(int slot) const { return c(Traits::kSlotsC + slot); }

  __device__ void init_barriers() const {
    for (int i = 0; i < Traits::kBarriers; i += 2) {
      barriers[i].init(1);
      barriers[i + 1].init(4 * Traits::kConsumers);
    }
  }

  // Starts to load 64 rows of q, k, v (which = 0 to 2) or dO (3). `to`: bytes at which they go.
  __device__ void load(int to, Barrier* full, int which, int head, int row) const {
    const int sample = head / p.heads, of_sample = head - sample * p.heads;
    const int chunk = (which < 3 ? which * p.heads + of_sample : of_sample) * Traits::kChunks;
    tma_load(shared + to, which < 3 ? &p.qkv : &p.grad, full, 0, row, chunk, sample);
  }

  // The producer, one thread: loads the rows of all units of the block.
  __device__ void produce() const {
    constexpr bool kQueries = kRole == Role::kForward || kRole == Role::kQueries;  // owned
    constexpr int a_array = kQueries ? 0 : 1, b_array = kQueries ? 3 : 2,
                  c_array = kQueries ? 1 : 0, d_array = kQueries ? 2 : 3;
    const int tiles = p.tokens / Traits::kStreamRows, units = p.tokens / Traits::kUnitRows;
    int count = 0, stream = 0;
    for (int unit = blockIdx.x; unit < p.units; unit += gridDim.x, ++count) {
      const int head = unit / units, row = unit % units * Traits::kUnitRows;
      const auto owned = [&](const Buffer& buffer, int first, int which) {
        buffer.empty->wait((count & 1) ^ 1);
        buffer.full->arrive_expect(Traits::kConsumers * Traits::kTileBytes);
        for (int i = 0; i < Traits::kConsumers; ++i)
          load(first + i * Traits::kTileBytes, buffer.full, which, head, row + i * kTileRows);
      };
      const auto streamed = [&](const Buffer& buffer, int uses, int to, int which, int tile) {
        buffer.empty->wait((uses & 1) ^ 1);
        buffer.full->arrive_expect(Traits::kStreamBytes);
        for (int i = 0; i < Traits::kStreamRows; i += kTileRows) {
          load(to + i * Traits::kTileBytes / kTileRows, buffer.full, which, head,
               tile * Traits::kStreamRows + i);
        }
      };
      owned(a(), 0, a_array);
      for (int tile = 0; tile < tiles; ++tile, ++stream) {
        const int slot_c = stream % Traits::kSlotsC, slot_d = stream % Traits::kSlotsD;
        streamed(c(slot_c), stream / Traits::kSlotsC, Traits::kC + slot_c * Traits::kStreamBytes,
                 c_array, tile);
        if (Traits::kSecond && tile == 0) owned(b(), Traits::kB, b_array);
        streamed(d(slot_d), stream / Traits::kSlotsD, Traits::kD + slot_d * Traits::kStreamBytes,
                 d_array, tile);
      }
    }
  }
};

}  // namespace jaxunet::cuda::hopper_attention
