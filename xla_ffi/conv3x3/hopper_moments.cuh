// Moments of what a strip stores, taken on its way out: for every channel the mean and the mean squared deviation over
// each tile of 8 × 8 pixels (see plan.h). The numbers are those that are stored, rounded to their type.
//
// They are sums of differences from a pivot, one of the tile's own pixels: what the pivot's distance from the mean adds
// to the sum of squares is at most 64 times the deviations themselves.
#pragma once

#include <cstring>
#include <type_traits>

#include "hopper_tile.h"
#include "numbers.cuh"
#include "plan.h"

namespace jaxunet::cuda {

static_assert(kMomentSide == kStripColumns, "a strip is one tile wide, one or two tiles high");

// Where the moments of a strip go.
struct StripMoments {
  float2* to = nullptr;  // of its first tile, channel 0
  int64_t below = 0;     // from there to the tile below
  int features = 0;
  int rows = 0, columns = 0;  // of the strip, inside the image; no rows: no moments are wanted

  // `all`: those of all strips, or null. A strip that lies in no sample has none.
  __device__ StripMoments(float2* all, int features_, const Schedule& schedule, const Strip& at, int strip_rows) {
    if (!all || at.sample >= schedule.batch) return;
    const int across = schedule.strips_across, down = (schedule.height + kMomentSide - 1) / kMomentSide;
    const int64_t tile =
        (static_cast<int64_t>(at.sample) * down + at.row / kMomentSide) * across + at.column / kMomentSide;
    to = all + tile * features_;
    below = static_cast<int64_t>(across) * features_;
    features = features_;
    rows = min(strip_rows, schedule.height - at.row);
    columns = min(kStripColumns, schedule.width - at.column);
  }

  // Of `tile` of the strip, from the sums of the differences from `pivot`.
  __device__ float2 of(int tile, float pivot, float sum, float squares) const {
    const float share = 1.0f / static_cast<float>(min(rows - tile * kMomentSide, kMomentSide) * columns);
    const float away = sum * share;
    return make_float2(pivot + away, fmaxf(squares * share - away * away, 0.0f));
  }
};

// The two numbers of a register. The compiler may not look behind it: it would undo the packing, and round one by one.
template <class T>
__device__ inline void unpack(uint32_t packed, float (&to)[2]) {
  asm("" : "+r"(packed));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // each the upper half of a float32
    const uint32_t halves[2] = {packed << 16, packed & 0xFFFF0000};
    memcpy(to, halves, 8);
  } else {
    T pair[2];
    memcpy(pair, &packed, 4);
    to[0] = wide(pair[0]);
    to[1] = wide(pair[1]);
  }
}

// In the fragments of a transposed product, where a thread has two channels, lane / 4 and eight further, of the pixels
// in columns 2 (lane % 4) and the next.
template <class T, int kRows>
struct FragmentMoments {
  static constexpr int kTiles = kRows / kMomentSide;
  static_assert(kTiles == 1 || kTiles == 2, "four lanes share four results, or two");

  uint32_t pivot[kTiles][2];                                 // of tiles and channels, as a pair of equals
  float sum[kTiles][2][2] = {}, squares[kTiles][2][2] = {};  // and columns

  // What is stored of two rows, `row` and the next; those outside of the image are as the pivot.
  __device__ void add(int row, const uint32_t (&packed)[4], int rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + i / 2, tile = at / kMomentSide, channel = i % 2;
      uint32_t& middle = pivot[tile][channel];
      if (at % kMomentSide == 0) {
        middle = __shfl_sync(~0u, packed[i], threadIdx.x % 32 & ~3) & 0xFFFF;
        middle |= middle << 16;
      }
      float values[2], from[2];
      unpack<T>(at < rows ? packed[i] : middle, values);
      unpack<T>(middle, from);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float away = values[column] - from[column];
        sum[tile][channel][column] += away;
        squares[tile][channel][column] += away * away;
      }
    }
  }

  // `first`: the first of the thread's channels.
  __device__ void finish(const StripMoments& moments, int first) const {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    const bool lower = kTiles == 2 && lane & 2, second = lane & 1;  // the result that this lane ends up with
    const auto inside = [&](const float (&of)[2]) {
      return (column < moments.columns ? of[0] : 0.0f) + (column + 1 < moments.columns ? of[1] : 0.0f);
    };
    // This lane's and its neighbour's, which keeps the other.
    const auto join = [](bool other, float a, float b, int step) {
      return (other ? b : a) + __shfl_xor_sync(~0u, other ? a : b, step);
    };
    const auto total = [&](const float (&of)[kTiles][2][2]) {
      float both[2];
#pragma unroll
      for (int channel = 0; channel < 2; ++channel) {
        const float upper = inside(of[0][channel]);
        if constexpr (kTiles == 2) {
          both[channel] = join(lower, upper, inside(of[1][channel]), 2);
        } else {
          both[channel] = upper + __shfl_xor_sync(~0u, upper, 2);
        }
      }
      return join(second, both[0], both[1], 1);
    };
    const float all = total(sum), all_squares = total(squares);
    const int tile = lower ? 1 : 0, channel = first + (second ? 8 : 0);
    const bool mine = kTiles == 2 || lane % 4 < 2;
    if (!mine || tile * kMomentSide >= moments.rows || channel >= moments.features) return;
    uint32_t middle = second ? pivot[0][1] : pivot[0][0];
    if (lower) middle = second ? pivot[kTiles - 1][1] : pivot[kTiles - 1][0];
    float from[2];
    unpack<T>(middle, from);
    moments.to[tile * moments.below + channel] = moments.of(tile, from[0], all, all_squares);
  }
};

// In the boxes of a strip of eight rows, once all of the warpgroup have stored there: each warp takes a quarter of the
// channels, each lane two of them, or half of the columns of two where a quarter is 32.
template <class T, int kFeatures>
__device__ void staged_moments(const unsigned char* boxes, const StripMoments& moments, int feature, int warp) {
  constexpr int kPixels = kMomentSide * kMomentSide, kLanes = kFeatures / 8, kShares = 32 / kLanes;
  constexpr int kColumns = kMomentSide / kShares;
  static_assert(kShares == 1 || kShares == 2, "from 128 to 256 channels");
  const int lane = threadIdx.x % 32, share = lane / kLanes, own = kFeatures / 4 * warp + 2 * (lane % kLanes);
  const unsigned char* box = boxes + own / kChunk * kPixels * kRowBytes + own % 8 * 2;
  const int eight = own % kChunk / 8;
  const auto read = [&](int row, int column, float (&values)[2]) {
    const auto* pixel = box + (row * kMomentSide + column) * kRowBytes + ((eight ^ column) << 4);
    unpack<T>(*reinterpret_cast<const uint32_t*>(pixel), values);
  };
  float pivot[2], sum[2] = {}, squares[2] = {};
  read(0, 0, pivot);
#pragma unroll 2
  for (int row = 0; row < moments.rows; ++row) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = share * kColumns + c;  // lanes that are left over have none
      if (column >= moments.columns) continue;
      float values[2];
      read(row, column, values);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float away = values[i] - pivot[i];
        sum[i] += away;
        squares[i] += away * away;
      }
    }
  }
  if constexpr (kShares == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], kLanes);
      squares[i] += __shfl_xor_sync(~0u, squares[i], kLanes);
    }
  }
  if (share > 0 || feature + own >= moments.features) return;
  const float2 a = moments.of(0, pivot[0], sum[0], squares[0]), b = moments.of(0, pivot[1], sum[1], squares[1]);
  *reinterpret_cast<float4*>(moments.to + feature + own) = make_float4(a.x, a.y, b.x, b.y);
}

}  // namespace jaxunet::cuda
