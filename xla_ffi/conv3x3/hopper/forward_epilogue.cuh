// Shift and epilogue of hopper_forward_kernel. The epilogue adds the residual to the accumulator of
// a strip, rounds, and stores through shared memory.
#pragma once

#include <cstring>

#include "common/types.cuh"
#include "common/wgmma.cuh"
#include "conv3x3/hopper/forward_block.cuh"

namespace jaxunet::cuda::forward {

// One thread, before the mainloop: loads the residual into the output buffer, where the epilogue
// adds to it.
template <class Block>
__device__ inline void load_residual(const Block& block, int consumer, const Strip& at, int feature,
                                     unsigned char* output) {
  using Traits = typename Block::Traits;
  tma_store_wait_read();
  block.residual_full[consumer].arrive_expect(Traits::kOutputBytes);
  for (int n = 0; n < Block::kFeatureChunks; ++n) {
    load_strip<Traits::kPacked>(output + n * Traits::kPixels * kRowBytes, &block.p.maps.residual,
                                &block.residual_full[consumer], feature + n * kChunk, at, 0);
  }
}

// Returns the address of a sample's shifts, or null if there are none. For a strip past the last
// image, any sample's shifts will do.
template <class Block>
__device__ inline const float* shifts_of(const Block& block, int sample) {
  const Parameters& p = block.p;
  const int64_t row = sample < p.schedule.batch ? sample : p.schedule.batch - 1;
  return p.shift.data ? p.shift.data + row * p.shift.stride : nullptr;
}

// Sets the accumulator of a tile that is not transposed to the shifts, before the mainloop. The
// reads overlap the wait for the first strip. `channel`: the tile's first output channel. The
// number of channels is a multiple of eight.
template <class Block>
__device__ inline void start_with_shift(const Block& block,
                                        typename Block::Accumulator& accumulator, const Strip& at,
                                        int channel) {
  const float* shifts = shifts_of(block, at.sample);
#pragma unroll
  for (int j = 0; j < Block::Traits::kWgmmaN / 8; ++j) {  // groups of eight columns (wgmma.cuh)
    const int f = channel + 8 * j;
    float2 two = make_float2(0.0f, 0.0f);
    if (shifts && f < block.p.features)
      two = *reinterpret_cast<const float2*>(shifts + f + threadIdx.x % 4 * 2);
    accumulator[4 * j] = accumulator[4 * j + 2] = two.x;
    accumulator[4 * j + 1] = accumulator[4 * j + 3] = two.y;
  }
}

// Reads the shifts of a thread's two output channels in a transposed tile. The epilogue adds them:
// if they were in the accumulator, consumers that alternate (ping-pong) would wait for the reads
// before their wgmmas.
template <class Block>
__device__ inline RowShifts<typename Block::Traits> read_row_shifts(const Block& block,
                                                                    const Strip& at, int channel) {
  using Traits = typename Block::Traits;
  constexpr int kColumns = RowShifts<Traits>::kColumns;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  RowShifts<Traits> found;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const int row = i / kColumns, column = i % kColumns;
    const float* shifts = shifts_of(block, at.sample + (lane % 4 * 2 + column) % Traits::kSamples);
    const int f = channel + 16 * warp + lane / 4 + 8 * row;
    found.at[row][column] = shifts && f < block.p.features ? shifts[f] : 0.0f;
  }
  return found;
}

// Adds the shifts of a transposed tile and, with kResidual, the residual, which lies in the output
// buffer. Writes the rounded sums to the output buffer.
template <bool kResidual, class Block>
__device__ inline void write_output(const typename Block::Accumulator& accumulator,
                                    const RowShifts<typename Block::Traits>& shifts,
                                    unsigned char* output) {
  using T = typename Block::T;
  using Traits = typename Block::Traits;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
  for (int j = 0; j < Traits::kKeptGroups; j += 2) {
    // Two groups of eight columns: 16 pixels, or 16 output channels. In each group, a thread holds
    // two adjacent columns of two rows, eight rows apart (wgmma.cuh).
    const float* columns = accumulator + 4 * Traits::kept_group(j);
    // stmatrix stores four 8 × 8 matrices: rows 0-7 and 8-15 of the warp's 16 rows, in groups j and
    // j + 1. This lane provides the address of one row of matrix `matrix`: eight output channels of
    // a pixel.
    const int pixel = Traits::kTransposed ? (j + matrix / 2) * 8 + lane % 8
                                          : 16 * warp + matrix % 2 * 8 + lane % 8;
    const int eight =
        Traits::kTransposed ? 2 * warp + matrix % 2 : j + matrix / 2;  // of output channels
    const uint32_t row = shared_address(output) +
                         (eight / 8 * Traits::kPixels + pixel) * kRowBytes +
                         ((eight % 8 ^ pixel % 8) << 4);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = columns[i];
      if constexpr (Traits::kTransposed)
        values[i] += shifts.at[i / 2 % 2][i % RowShifts<Traits>::kColumns];
    }
    if constexpr (kResidual) {
      uint32_t residual[4];
      ldmatrix_x4<Traits::kTransposed>(residual, row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        T pair[2];
        memcpy(pair, &residual[i], 4);
        values[2 * i] += wide(pair[0]);
        values[2 * i + 1] += wide(pair[1]);
      }
    }
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T pair[2] = {narrow<T>(values[2 * i]), narrow<T>(values[2 * i + 1])};
      memcpy(&packed[i], pair, 4);
    }
    stmatrix_x4<Traits::kTransposed>(row, packed);
  }
}

template <class T, class Traits, bool kFlipped>
__device__ inline void Block<T, Traits, kFlipped>::epilogue(const Accumulator& accumulator,
                                                            const RowShifts<Traits>& shifts,
                                                            int consumer, const Strip& at,
                                                            int feature, unsigned char* output,
                                                            int phase) const {
  const int thread = threadIdx.x % kWarpgroup;
  // Keeps the compiler from moving the reads of the shifts behind the mainloop.
  if constexpr (Traits::kTransposed) asm volatile("" ::"f"(shifts.at[0][0]), "f"(shifts.at[1][0]));
  // The output buffer holds the residual, or is free once the last store has read it.
  if (p.residual) {
    residual_full[consumer].wait(phase);
    write_output<true, Block>(accumulator, shifts, output);
  } else {
    if (thread == 0) tma_store_wait_read();
    named_barrier_sync(1 + consumer, kWarpgroup);
    write_output<false, Block>(accumulator, shifts, output);
  }
  fence_async_proxy();
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (thread == 0) {
    for (int n = 0; n < kFeatureChunks; ++n) {
      int part = 0, first = feature + n * kChunk;  // of the channels in the part
      while (part + 1 < p.y_parts && first >= p.y_channels[part]) first -= p.y_channels[part++];
      store_strip<Traits::kPacked>(&p.maps.y[part], output + n * Traits::kPixels * kRowBytes, first,
                                   at);
    }
    tma_store_commit();
  }
}

}  // namespace jaxunet::cuda::forward
