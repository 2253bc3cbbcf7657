// The epilogue of hopper_forward_kernel: adds shift and residual to the accumulator of a strip,
// rounds, and stores through shared memory.
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

// The shift of an output channel; 0 past the last. For a strip past the last image, any sample's
// shift will do.
template <class Block>
__device__ inline float shift_of(const Block& block, int sample, int feature) {
  const Parameters& p = block.p;
  const int64_t row = sample < p.schedule.batch ? sample : p.schedule.batch - 1;
  return p.shift.data && feature < p.features ? p.shift.data[row * p.shift.stride + feature] : 0.0f;
}

// Called before the mainloop; see Shifts in forward_block.cuh.
template <class Block>
__device__ inline Shifts<typename Block::Traits> prefetch_shifts(const Block& block,
                                                                 const Strip& at, int feature) {
  using Traits = typename Block::Traits;
  constexpr int kColumns = Shifts<Traits>::kColumns;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  Shifts<Traits> shifts{};
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const int row = i / kColumns, column = i % kColumns;
    if constexpr (Traits::kTransposed) {
      shifts.at[row][column] =
          shift_of(block, at.sample + (lane % 4 * 2 + column) % Traits::kSamples,
                   feature + 16 * warp + lane / 4 + 8 * row);
    } else if (kWarpgroup * row < Traits::kFeatures) {
      shifts.at[row][column] = shift_of(block, at.sample, feature + kWarpgroup * row + thread);
    }
  }
  return shifts;
}

template <class T, class Traits, bool kFlipped>
__device__ inline void Block<T, Traits, kFlipped>::epilogue(const Accumulator& accumulator,
                                                            const Shifts<Traits>& shifts,
                                                            int consumer, const Strip& at,
                                                            int feature, unsigned char* output,
                                                            int phase) const {
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32,
            matrix = lane / 8;
  // Keeps the compiler from moving prefetch_shifts' reads behind the mainloop.
  asm volatile("" ::"f"(shifts.at[0][0]), "f"(shifts.at[1][0]));
  // The output buffer holds the residual, or is free once the last store has read it.
  if (p.residual) {
    residual_full[consumer].wait(phase);
  } else {
    if (thread == 0) tma_store_wait_read();
    named_barrier_sync(1 + consumer, kWarpgroup);
  }
  const int channel = channel_of(feature);
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
      const int f = channel + 8 * (j + i / 4) + lane % 4 * 2 + i % 2;
      values[i] =
          columns[i] + (Traits::kTransposed ? shifts.at[i / 2 % 2][i % Shifts<Traits>::kColumns]
                                            : shift_of(*this, at.sample, f));
    }
    if (p.residual) {
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
