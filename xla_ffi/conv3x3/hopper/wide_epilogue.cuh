// The epilogue of hopper_forward_kernel for float32 results: adds the residual, and the shifts
// of a transposed tile, to the accumulator of a strip and stores the sums from registers. Each
// store of a warp writes whole sectors of 32 bytes: eight adjacent output channels of a pixel.
#pragma once

#include "conv3x3/hopper/forward_epilogue.cuh"

namespace jaxunet::cuda::forward {

// All threads of a consumer. `feature`: the tile's first output channel.
template <class Block>
__device__ inline void wide_epilogue(const Block& block,
                                     const typename Block::Accumulator& accumulator,
                                     const RowShifts<typename Block::Traits>& shifts,
                                     const Strip& at, int feature) {
  using Traits = typename Block::Traits;
  const auto& p = block.p;
  const Schedule& s = p.schedule;
  float* __restrict__ y = p.wide_y;
  const float* __restrict__ residual = p.wide_residual;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  // The index in y of an output of the tile; -1 outside of the images and past the last channel.
  const auto place = [&](int pixel, int f) -> int64_t {
    const int sample = at.sample + pixel % Traits::kSamples;
    const int in_strip = pixel / Traits::kSamples;
    const int row = at.row + in_strip / Traits::kStripColumns,
              column = at.column + in_strip % Traits::kStripColumns;
    if (sample >= s.batch || row >= s.height || column >= s.width || f >= p.features) return -1;
    return ((static_cast<int64_t>(sample) * s.height + row) * s.width + column) * p.features + f;
  };
#pragma unroll
  for (int j = 0; j < Traits::kKeptGroups; ++j) {
    // In a group of eight columns, a thread holds two adjacent columns of two rows, eight rows
    // apart (wgmma.cuh).
    const float* values = accumulator + 4 * Traits::kept_group(j);
    const int column = 8 * j + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * i;
      if constexpr (Traits::kTransposed) {  // rows are output channels
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int64_t to = place(column + k, feature + row);
          if (to < 0) continue;
          const float added = residual ? residual[to] : 0.0f;
          y[to] = values[2 * i + k] + shifts.at[i][k % RowShifts<Traits>::kColumns] + added;
        }
      } else {
        const int f = feature + column;
        const int64_t to = place(row, f);  // features are a multiple of 8
        if (to < 0) continue;
        const float2 added =
            residual ? *reinterpret_cast<const float2*>(residual + to) : make_float2(0.0f, 0.0f);
        *reinterpret_cast<float2*>(y + to) =
            make_float2(values[2 * i] + added.x, values[2 * i + 1] + added.y);
      }
    }
  }
}

}  // namespace jaxunet::cuda::forward
