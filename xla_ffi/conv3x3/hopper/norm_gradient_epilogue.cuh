// The epilogue of an input gradient that continues through the SiLU and the affine map of the norm
// before the convolution. With dactive, the gradient in the accumulator, and z = a · x + b, it
// stores
//
//   dz = dactive · SiLU'(z)
//
// and, for each strip and channel, the sums of dz and of dz · x over the strip's pixels, which the
// norm's gradient needs (norm_sums.cu adds them over the strips of a sample). So dactive never goes
// to global memory, and only one later kernel reads x and dz.
//
// TMA loads x into the output buffer during the mainloop, as it does a residual.
//
// The order of the sums is fixed. In a transposed tile, a warp has all pixels of 16 channels: each
// thread sums its pixels, then the four lanes of a channel are summed. In other tiles, a warp has
// 16 pixels of all channels: for each 16 channels, the eight lanes of a channel are summed, then
// the four warps through shared memory:
//
//     sums      C x 4 x 2 x features   floats, behind the barriers: both sums of each warp
//
// Named barrier 1 + c is used as in forward.cuh, and once more before the previous tile's sums are
// overwritten.
#pragma once

#include <cstring>

#include "common/special_functions.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"
#include "conv3x3/hopper/forward_block.cuh"

namespace jaxunet::cuda::forward {

// One thread, before the mainloop: loads x into the output buffer.
template <class Block>
__device__ inline void load_normed(const Block& block, int consumer, const Strip& at, int feature,
                                   unsigned char* output) {
  using Traits = typename Block::Traits;
  tma_store_wait_read();
  block.residual_full[consumer].arrive_expect(Traits::kOutputBytes);
  for (int n = 0; n < Block::kFeatureChunks; ++n) {
    int part = 0, channel = feature + n * kChunk;
    while (part + 1 < block.p.normed_parts && channel >= block.p.normed_channels[part])
      channel -= block.p.normed_channels[part++];
    load_strip<false>(output + n * Traits::kPixels * kRowBytes, &block.p.normed[part],
                      &block.residual_full[consumer], channel, at, 0);
  }
}

// a and b of a channel, halved because silu_slope takes z / 2.
struct HalfAffine {
  float a, b;
};

// The halved map of one channel, or of an even channel and the next one; zeros past the last
// channel. For a strip past the last image, any sample's map will do.
template <class Block>
__device__ inline HalfAffine half_affine(const Block& block, int sample, int feature) {
  const auto& p = block.p;
  if (feature >= p.features) return {0, 0};
  const int64_t row = sample < p.schedule.batch ? sample : p.schedule.batch - 1;
  return {0.5f * p.a.data[row * p.a.stride + feature], 0.5f * p.b.data[row * p.b.stride + feature]};
}
template <class Block>
__device__ inline void half_affines(const Block& block, int sample, int feature,
                                    HalfAffine (&to)[2]) {
  const auto& p = block.p;
  float2 a{}, b{};
  if (feature < p.features) {
    const int64_t row = sample < p.schedule.batch ? sample : p.schedule.batch - 1;
    a = *reinterpret_cast<const float2*>(p.a.data + row * p.a.stride + feature);
    b = *reinterpret_cast<const float2*>(p.b.data + row * p.b.stride + feature);
  }
  to[0] = {0.5f * a.x, 0.5f * b.x};
  to[1] = {0.5f * a.y, 0.5f * b.y};
}

// The affine maps that a thread reads before the mainloop, which hides the latency. In a transposed
// tile, a thread keeps the maps of its two accumulator rows. In other tiles a thread needs the maps
// of many channels. Here it reads one or two of the tile's maps only to bring them into the L1
// cache; the epilogue reads all that it needs.
struct Affines {
  HalfAffine at[2];
};
template <class Block>
__device__ inline Affines prefetch_affines(const Block& block, const Strip& at, int feature) {
  using Traits = typename Block::Traits;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  Affines affines{};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (Traits::kTransposed) {
      affines.at[row] = half_affine(block, at.sample, feature + 16 * warp + lane / 4 + 8 * row);
    } else if (kWarpgroup * row < Traits::kFeatures) {
      affines.at[row] = half_affine(block, at.sample, feature + kWarpgroup * row + thread);
    }
  }
  return affines;
}

// SiLU'(z), with half = z / 2. With t = tanh(half): sigmoid(z) = (1 + t) / 2, so SiLU'(z) =
// sigmoid(z) · (1 + z · (1 - sigmoid(z))) = (1 + t + half · (1 - t²)) / 2. The absolute error of
// the result is that of fast_tanh, at most 2^-11, times |1 - 2 · t · half| / 2.
__device__ inline float silu_slope(float half) {
  const float t = fast_tanh(half);
  return 0.5f * ((1.0f + t) + half * (1.0f - t * t));
}

// Sums kCount values over the kCount lanes whose numbers differ only in the bits kLowest, 2 ·
// kLowest, ..., kCount / 2 · kLowest. Each lane gets one total: that of value lane / kLowest %
// kCount.
template <int kCount, int kLowest>
__device__ inline float sum_and_share(float (&values)[kCount]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool upper = lane & (kLowest * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? values[half + i] : values[i],
                  given = upper ? values[i] : values[half + i];
      values[i] = kept + __shfl_xor_sync(0xffffffff, given, kLowest * half);
    }
  }
  return values[0];
}

// All threads of a consumer. `strip`: its number in the batch; `phase`: parity of residual_full.
template <class Block>
__device__ inline void norm_gradient_epilogue(const Block& block,
                                              const typename Block::Accumulator& accumulator,
                                              const Affines& affines, int consumer, int strip,
                                              const Strip& at, int feature, unsigned char* output,
                                              int phase) {
  using T = typename Block::T;
  using Traits = typename Block::Traits;
  constexpr bool kTransposed = Traits::kTransposed;
  const auto& p = block.p;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32,
            matrix = lane / 8;
  float* const warp_sums = block.sums + (consumer * 4 + warp) * 2 * Traits::kFeatures;
  float* const to = p.partial_sums + static_cast<int64_t>(strip) * 2 * p.features;
  // Keeps the compiler from moving prefetch_affines' reads behind the mainloop.
  asm volatile("" ::"f"(affines.at[0].a), "f"(affines.at[0].b), "f"(affines.at[1].a),
               "f"(affines.at[1].b));
  block.residual_full[consumer].wait(phase);
  if constexpr (!kTransposed) named_barrier_sync(1 + consumer, kWarpgroup);
  float row_sums[4] = {};  // transposed: dz of both rows, then dz · x
#pragma unroll
  for (int j = 0; j < Traits::kKeptGroups; j += 2) {
    // Two groups of eight columns, as in Block::epilogue.
    const float* columns = accumulator + 4 * j;
    const int pixel =
        kTransposed ? (j + matrix / 2) * 8 + lane % 8 : 16 * warp + matrix % 2 * 8 + lane % 8;
    const int eight = kTransposed ? 2 * warp + matrix % 2 : j + matrix / 2;
    const uint32_t row = shared_address(output) +
                         (eight / 8 * Traits::kPixels + pixel) * kRowBytes +
                         ((eight % 8 ^ pixel % 8) << 4);
    uint32_t packed[4];
    ldmatrix_x4<kTransposed>(packed, row);
    float column_sums[8] = {};  // otherwise: dz of four columns, then dz · x
    HalfAffine of_columns[2][2];
    if constexpr (!kTransposed) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        half_affines(block, at.sample, feature + 8 * (j + i) + lane % 4 * 2, of_columns[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T pair[2];
      memcpy(pair, &packed[i], 4);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        // Value 2 i + k: group j + i / 2, row i % 2, column k of the thread's two.
        const int group = j + i / 2;
        const HalfAffine affine = kTransposed ? affines.at[i % 2] : of_columns[i / 2][k];
        const int down = kTransposed ? group : 2 * warp + i % 2,
                  right = kTransposed ? lane % 4 * 2 + k : lane / 4;
        const bool inside =
            at.row + down < p.schedule.height && at.column + right < p.schedule.width;
        const float x = wide(pair[k]);
        const float dz = inside ? columns[2 * i + k] * silu_slope(affine.a * x + affine.b) : 0.0f;
        if constexpr (kTransposed) {
          row_sums[i % 2] += dz;
          row_sums[2 + i % 2] += dz * x;
        } else {
          column_sums[i / 2 * 2 + k] += dz;
          column_sums[4 + i / 2 * 2 + k] += dz * x;
        }
        pair[k] = narrow<T>(dz);
      }
      memcpy(&packed[i], pair, 4);
    }
    stmatrix_x4<kTransposed>(row, packed);
    if constexpr (!kTransposed) {
      const float total = sum_and_share<8, 4>(column_sums);
      const int n = lane / 4;  // which value this lane has the total of
      warp_sums[n / 4 * Traits::kFeatures + 8 * (j + n / 2 % 2) + lane % 4 * 2 + n % 2] = total;
    }
  }
  fence_async_proxy();
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (thread == 0) {
    for (int n = 0; n < Block::kFeatureChunks; ++n) {
      store_strip<false>(&p.maps.y[0], output + n * Traits::kPixels * kRowBytes,
                         feature + n * kChunk, at);
    }
    tma_store_commit();
  }
  const bool there = at.sample < p.schedule.batch;
  if constexpr (kTransposed) {
    const float total = sum_and_share<4, 1>(row_sums);
    const int n = lane % 4, channel = feature + 16 * warp + lane / 4 + n % 2 * 8;
    if (there && channel < p.features) to[n / 2 * p.features + channel] = total;
  } else {
    const float* const all = block.sums + consumer * 4 * 2 * Traits::kFeatures;
    for (int i = thread; i < 2 * Traits::kFeatures; i += kWarpgroup) {
      float total = all[i];
#pragma unroll
      for (int w = 1; w < 4; ++w) total += all[w * 2 * Traits::kFeatures + i];
      const int channel = feature + i % Traits::kFeatures;
      if (there && channel < p.features) to[i / Traits::kFeatures * p.features + channel] = total;
    }
  }
}

}  // namespace jaxunet::cuda::forward
