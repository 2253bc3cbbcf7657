// Shared by all warpgroups of a block of the streaming kernels: roles, tile sizes, the
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
  const void* out;        // backward: the output of the forward pass
  float* lse;             // written by the forward pass
  void* result;           // out or dqkv
  int heads, tokens;      // heads per sample; tokens per head
  int units;              // units in the batch
};

// Rows of 64 channels; a wider head has several such tiles side by side.
using ChunkTile = HeadTile<64>;

template <class T_, int kWidth_, Role kRole_>
struct StreamingTraits {
  using T = T_;
  static constexpr Role kRole = kRole_;
  static constexpr int kWidth = kWidth_, kChunks = kWidth / 64, kConsumers = 2,
                       kThreads = (kConsumers + 1) * kWarpgroup, kUnitRows = kConsumers * kTileRows,
                       kStreamRows = kWidth == 64 ? 128 : 64;
  // Most tokens of a head in the backward pass: lse and delta take 8 bytes of shared memory per
  // query, and with 256 channels the tiles leave room for no more tokens.
  static constexpr int kMaxTokens = kWidth == 64 ? 4096 : 256;
  static constexpr bool kBackward = kRole != Role::kForward;
  // True if the job needs b and dp = dO * v^T.
  static constexpr bool kHasDp = kBackward && kRole != Role::kValues;
  // True if keys are owned: then the queries, with their lse and delta, are the columns of the
  // products.
  static constexpr bool kColumnStatistics = kBackward && kRole != Role::kQueries;
  static constexpr bool kWritesDeltas = kRole == Role::kQueries && kWidth == 256;
  // The array of dqkv through which deltas pass to later launches.
  static constexpr Qkv kDeltaArray = kWidth == 256 ? kV : kQ;
  static_assert(
      kStreamRows == kTileRows || kChunks == 1,
      "a box of TMA has kTileRows rows of all chunks, so several make a tile of one chunk");
  // Bytes of a consumer's owned rows and of a streamed tile, as a whole and per chunk of 64
  // channels.
  static constexpr int kTileBytes = kTileRows * kWidth * 2, kStreamBytes = kStreamRows * kWidth * 2;
  static constexpr int kTileChunkBytes = kTileRows * ChunkTile::kRowBytes,
                       kStreamChunkBytes = kStreamRows * ChunkTile::kRowBytes;
  // Stages of the rings; d has only one if a, b and c leave no room for two.
  static constexpr int kStagesC = 2, kStagesD = kHasDp && kWidth == 256 ? 1 : 2;
  // Byte offsets where b, c and d begin and the tiles end.
  static constexpr int kB = kConsumers * kTileBytes, kC = kB + (kHasDp ? kB : 0),
                       kD = kC + kStagesC * kStreamBytes, kTilesEnd = kD + kStagesD * kStreamBytes;
  static constexpr int kStatisticsBytes = kColumnStatistics ? 2 * kMaxTokens * 4 : 0;
  static constexpr int kBarriers = 2 * (2 + kStagesC + kStagesD);
  static constexpr int kBytes = kTilesEnd + kStatisticsBytes + kBarriers * 8;
};

// The barriers of a buffer: a, b, or a stage of c or d.
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
    deltas = lses + Traits::kMaxTokens;
    barriers = reinterpret_cast<Barrier*>(shared + Traits::kTilesEnd + Traits::kStatisticsBytes);
  }
  __device__ Buffer a() const { return {barriers, barriers + 1}; }
  __device__ Buffer b() const { return {barriers + 2, barriers + 3}; }
  __device__ Buffer c(int stage) const {
    return {barriers + 4 + 2 * stage, barriers + 5 + 2 * stage};
  }
  __device__ Buffer d(int stage) const { return c(Traits::kStagesC + stage); }

  __device__ void init_barriers() const {
    for (int i = 0; i < Traits::kBarriers; i += 2) {
      barriers[i].init(1);                           // full
      barriers[i + 1].init(4 * Traits::kConsumers);  // empty
    }
  }

  // Starts to load 64 rows of an array: Qkv or kGrad. `to`: byte offset of the destination.
  __device__ void load(int to, Barrier* full, int which, int head, int row) const {
    const int sample = head / p.heads, sample_head = head - sample * p.heads;
    const int chunk =
        (which < kGrad ? which * p.heads + sample_head : sample_head) * Traits::kChunks;
    tma_load(shared + to, which < kGrad ? &p.qkv : &p.grad, full, 0, row, chunk, sample);
  }

  // The producer, one thread: loads the rows of all units of the block.
  __device__ void produce() const {
    constexpr bool kOwnsQueries = kRole == Role::kForward || kRole == Role::kQueries;
    constexpr int a_array = kOwnsQueries ? kQ : kK, b_array = kOwnsQueries ? int{kGrad} : kV,
                  c_array = kOwnsQueries ? kK : kQ, d_array = kOwnsQueries ? kV : int{kGrad};
    const int tiles = p.tokens / Traits::kStreamRows, head_units = p.tokens / Traits::kUnitRows;
    int count = 0, stream = 0;  // units and tiles loaded so far, which give stages and parities
    for (int unit = blockIdx.x; unit < p.units; unit += gridDim.x, ++count) {
      const int head = unit / head_units, row = unit % head_units * Traits::kUnitRows;
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
        const int stage_c = stream % Traits::kStagesC, stage_d = stream % Traits::kStagesD;
        streamed(c(stage_c), stream / Traits::kStagesC, Traits::kC + stage_c * Traits::kStreamBytes,
                 c_array, tile);
        if (Traits::kHasDp && tile == 0) owned(b(), Traits::kB, b_array);
        streamed(d(stage_d), stream / Traits::kStagesD, Traits::kD + stage_d * Traits::kStreamBytes,
                 d_array, tile);
      }
    }
  }
};

}  // namespace jaxunet::cuda::hopper_attention
