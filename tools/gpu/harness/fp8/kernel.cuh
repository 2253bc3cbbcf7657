// Forward 3×3 convolution of NHWC images of e4m3 with 128 channels and 128 output channels, stride
// 1, zero padding 1, on Hopper. The structure is that of conv3x3/hopper/forward.cuh, whose head
// explains strips and taps; this one differs where 8 bits allow it:
//
// - 128 channels are 128 bytes, so a pixel is one swizzled row of shared memory and a strip arrives
//   in one TMA box: K is nine taps × four wgmmas of 32 channels.
// - All weights, (tap, output channel, channel), take 144 KB. They are loaded once and stay.
// - The two consumers work on different strips: strip n of a block is in slot n % kStages of one
//   ring and belongs to consumer n % 2. With kTurns one consumer at a time issues its wgmmas
//   (ping-pong). Without, both issue when they can; consumer 1 begins once consumer 0 has issued
//   half of the units of its first strip, so that the epilogue of one meets the wgmmas of the
//   other.
//
// A strip has 8 columns × 8 kTiles rows: kTiles products of 64 pixels × 128 output channels.
//
// Promotion: wgmma adds products of e4m3 in about 14 bits. After every kPromote wgmmas of 32
// channels the sum so far goes into float32 registers (`total`), and the next wgmmas begin at zero
// in registers of their own (`partial`; two sets with one tile, so that the next wgmmas run during
// the additions). kPromote = kSteps never does.
//
// Barriers: strip_full and weights_full (1 arrival + bytes), strip_empty and turn (lane 0 of each
// warp of a consumer: 4). Parities: strip n waits for strip_full with n / kStages % 2, the producer
// for strip_empty with the opposite; weights_full with 0; turn with n / 2 % 2.
//
// Shared memory: strips, outputs, 1,024 bytes for barriers, weights; each begins at a multiple of
// 1,024 bytes, the period of the swizzle.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "instructions.cuh"

namespace jaxunet::cuda::fp8 {

constexpr int kChannels = 128, kTaps = 9, kRowBytes = 128, kColumns = 8, kHaloColumns = 10;
constexpr int kTapBytes = kChannels * kRowBytes, kWeightBytes = kTaps * kTapBytes;
constexpr int kConsumers = 2, kWarpgroup = 128, kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kBarrierBytes = 1024, kMaxSharedBytes = 227 * 1024;
constexpr int kSteps = kTaps * kChannels / 32;  // wgmmas of K for one accumulator
constexpr int kBoxBytes = 64 * kRowBytes;       // an output box: 64 pixels × 64 channels of bf16
// 65,536 registers / 384 threads, in eights, are 168 each at launch: 240 + 240 + 24 <= 3 × 168.
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

// kScalar: computes the products from the same shared memory without wgmma, to locate mistakes.
template <int tiles, int promote, int stages, bool turns, bool scalar = false>
struct Variant {
  static constexpr int kTiles = tiles, kPromote = promote, kStages = stages;
  static constexpr bool kTurns = turns, kScalar = scalar;
  static constexpr int kRows = 8 * tiles;  // of pixels in a strip
  static constexpr int kLoadedBytes = (kRows + 2) * kHaloColumns * kRowBytes;
  static constexpr int kStripBytes = (kLoadedBytes + 1023) / 1024 * 1024;
  static constexpr int kFixedBytes = stages * kStripBytes + kBarrierBytes + kWeightBytes;
  // Output boxes that a consumer writes at once.
  static constexpr int kOutputBoxes =
      kFixedBytes + kConsumers * 2 * kBoxBytes <= kMaxSharedBytes ? 2 : 1;
  static constexpr int kOutputBytes = kOutputBoxes * kBoxBytes;
  static constexpr int kSharedBytes = kFixedBytes + kConsumers * kOutputBytes;
  static constexpr int kGroups = kSteps / promote;  // of wgmmas between promotions
  static constexpr int kPartials = tiles == 1 ? 2 : 1;
  static_assert(kSteps % promote == 0 && kSharedBytes <= kMaxSharedBytes && stages >= 2);
};

// The kernel's only parameter. Tensor maps as 16-bit types see them, so two channels of x and of
// the weights are one element. Boxes: a strip with its halo; one tap; 64 pixels × 64 channels of y.
struct Parameters {
  CUtensorMap x, weights, y;
  const float *scale, *bias;  // y = scale[0] · convolution + bias
  int strips, strips_of_image, strips_across;
};

template <class V>
struct Block {
  const Parameters& p;
  unsigned char *strips, *outputs, *weights;
  Barrier *strip_full, *strip_empty, *weights_full, *turn;

  __device__ Block(const Parameters& parameters, unsigned char* shared) : p(parameters) {
    strips = shared;
    outputs = strips + V::kStages * V::kStripBytes;
    strip_full = reinterpret_cast<Barrier*>(outputs + kConsumers * V::kOutputBytes);
    strip_empty = strip_full + V::kStages;
    weights_full = strip_empty + V::kStages;
    turn = weights_full + kTaps;
    weights = reinterpret_cast<unsigned char*>(strip_full) + kBarrierBytes;
  }
  __device__ void init_barriers() const {
    for (int i = 0; i < V::kStages; ++i) {
      strip_full[i].init(1);
      strip_empty[i].init(4);
    }
    for (int i = 0; i < kTaps; ++i) weights_full[i].init(1);
    for (int i = 0; i < kConsumers; ++i) turn[i].init(4);
    fence_barrier_init();
  }
  // The first pixel of a strip.
  struct Place {
    int sample, row, column;
  };
  __device__ Place place_of(int strip) const {
    const int sample = strip / p.strips_of_image, rest = strip - sample * p.strips_of_image,
              down = rest / p.strips_across;
    return {sample, down * V::kRows, (rest - down * p.strips_across) * kColumns};
  }
};

// One thread: loads the weights once, and the strips of the block.
template <class V>
__device__ inline void produce(const Block<V>& block) {
  const Parameters& p = block.p;
  unsigned n = 0;
  for (int strip = blockIdx.x; strip < p.strips; strip += gridDim.x, ++n) {
    const unsigned slot = n % V::kStages;
    const auto at = block.place_of(strip);
    block.strip_empty[slot].wait((n / V::kStages + 1) % 2);  // returns at once in the first round
    block.strip_full[slot].arrive_expect(V::kLoadedBytes);
    tma_load(block.strips + slot * V::kStripBytes, &p.x, &block.strip_full[slot], 0, at.column - 1,
             at.row - 1, at.sample);
    for (int tap = 0; n == 0 && tap < kTaps; ++tap) {
      block.weights_full[tap].arrive_expect(kTapBytes);
      tma_load(block.weights + tap * kTapBytes, &p.weights, &block.weights_full[tap], 0, 0, tap);
    }
  }
}

// The row of a strip in shared memory where the pixels of a tap begin, for one tile of 64 pixels.
__device__ constexpr int first_row(int tile, int tap) {
  return (8 * tile + tap / 3) * kHaloColumns + tap % 3;
}

// total = the products of a strip. Calls issued(n, of) when n of all units of wgmmas are issued.
// kFirst: waits for each tap's weights. Later strips have code of their own without these waits,
// because ptxas ends a group of wgmmas at every branch, and waits for promotion would be too long.
template <bool kFirst, class V, class Issued>
__device__ inline void multiply(const Block<V>& block, uint32_t strip,
                                float (&total)[V::kTiles][64], const Issued& issued) {
  constexpr int kUnits = 1 + V::kTiles * (V::kGroups - 1);
  const uint64_t pixels = smem_descriptor(strip, kHaloColumns * kRowBytes),
                 weights = smem_descriptor(shared_address(block.weights), 8 * kRowBytes);
  float partial[V::kPartials][64];
  // Unit 0 is the first group of all tiles, directly in `total`; each further unit is a group of
  // one tile, whose sum is added once its wgmmas are complete.
  const auto tile_of = [](int u) { return (u - 1) % V::kTiles; };
  const auto add = [&](int u) {
    if (u == 0) return;
    if (u <= V::kTiles) fence_accumulator(total[tile_of(u)]);
    fence_accumulator(partial[u % V::kPartials]);
#pragma unroll
    for (int i = 0; i < 64; ++i) total[tile_of(u)][i] += partial[u % V::kPartials][i];
  };
  const auto issue = [&](float (&accumulator)[64], int tile, int step, bool accumulate) {
    const int tap = step / 4, bytes = step % 4 * 32;
    wgmma_e4m3(accumulator, advance(pixels, first_row(tile, tap) * kRowBytes + bytes),
               advance(weights, tap * kTapBytes + bytes), accumulate);
  };
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int group = (u + V::kTiles - 1) / V::kTiles;
#pragma unroll
    for (int i = 0; i < V::kPromote; ++i) {
      const int step = group * V::kPromote + i;
      if (kFirst && step % 4 == 0) block.weights_full[step / 4].wait(0);
      if ((kFirst && step % 4 == 0) || i == 0) wgmma_fence();
      if (u > 0) {
        issue(partial[u % V::kPartials], tile_of(u), step, i > 0);
      } else {
#pragma unroll
        for (int tile = 0; tile < V::kTiles; ++tile) issue(total[tile], tile, step, i > 0);
      }
    }
    wgmma_commit();
    issued(u + 1, kUnits);
    if (V::kPartials == 2 && u > 0) {
      wgmma_wait<1>();
      add(u - 1);
    } else if (V::kPartials == 1 && u > 0) {
      wgmma_wait<0>();
      add(u);
    }
  }
  wgmma_wait<0>();
  if (V::kPartials == 2) add(kUnits - 1);
#pragma unroll
  for (int tile = 0; tile < V::kTiles; ++tile) fence_accumulator(total[tile]);
}

// The same without wgmma, from the swizzled rows.
template <class V>
__device__ inline void multiply_scalar(const Block<V>& block, uint32_t strip,
                                       float (&total)[V::kTiles][64]) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const auto number = [](uint32_t base, int row, int channel) {
    return read_e4m3(base + row * kRowBytes + (channel ^ ((row % 8) << 4)));
  };
#pragma unroll
  for (int tile = 0; tile < V::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 64; ++i) total[tile][i] = 0;
#pragma unroll 1
    for (int k = 0; k < kTaps * kChannels; ++k) {
      const int tap = k / kChannels, channel = k % kChannels;
      block.weights_full[tap].wait(0);
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pixel = 16 * warp + 8 * i + lane / 4;
        x[i] =
            number(strip, first_row(tile, tap) + pixel / kColumns * kHaloColumns + pixel % kColumns,
                   channel);
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const int feature = i / 4 * 8 + lane % 4 * 2 + i % 2;
        total[tile][i] += x[i / 2 % 2] *
                          number(shared_address(block.weights) + tap * kTapBytes, feature, channel);
      }
    }
  }
}

// Scales, adds the bias, rounds, and stores the strip through the consumer's output buffer.
template <class V>
__device__ inline void write(const Block<V>& block, const float (&total)[V::kTiles][64],
                             float scale, int consumer, int strip) {
  const Parameters& p = block.p;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32,
            matrix = lane / 8, pixel = 16 * warp + matrix % 2 * 8 + lane % 8;
  const auto at = block.place_of(strip);
  unsigned char* const output = block.outputs + consumer * V::kOutputBytes;
#pragma unroll
  for (int first = 0; first < 2 * V::kTiles; first += V::kOutputBoxes) {
    if (thread == 0) tma_store_wait_read();
    named_barrier_sync(1 + consumer, kWarpgroup);
#pragma unroll
    for (int n = 0; n < V::kOutputBoxes; ++n) {
      const int tile = (first + n) / 2, half = (first + n) % 2;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {  // two groups of eight output channels
        const uint32_t row = shared_address(output) + n * kBoxBytes + pixel * kRowBytes +
                             (((j + matrix / 2) ^ pixel % 8) << 4);
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* two = total[tile] + 4 * (8 * half + j) + 2 * i;
          const float2 bias =
              *reinterpret_cast<const float2*>(p.bias + 64 * half + 8 * (j + i / 2) + lane % 4 * 2);
          const __nv_bfloat162 pair =
              __floats2bfloat162_rn(two[0] * scale + bias.x, two[1] * scale + bias.y);
          memcpy(&packed[i], &pair, 4);
        }
        stmatrix_x4<false>(row, packed);
      }
    }
    fence_async_proxy();
    named_barrier_sync(1 + consumer, kWarpgroup);
    if (thread > 0) continue;
#pragma unroll
    for (int n = 0; n < V::kOutputBoxes; ++n) {
      tma_store(&p.y, output + n * kBoxBytes, (first + n) % 2 * 64, at.column,
                at.row + 8 * ((first + n) / 2), at.sample);
    }
    tma_store_commit();
  }
}

// A consumer warpgroup: every other strip of the block.
template <class V>
__device__ inline void consume(const Block<V>& block, int consumer) {
  const Parameters& p = block.p;
  const bool elected = threadIdx.x % 32 == 0;  // arrives for its warp
  const float scale = p.scale[0];
  if (V::kTurns && consumer == 1 && elected) block.turn[0].arrive();
  unsigned n = consumer;
  for (int strip = blockIdx.x + consumer * gridDim.x; strip < p.strips;
       strip += kConsumers * gridDim.x, n += kConsumers) {
    const unsigned slot = n % V::kStages;
    block.strip_full[slot].wait(n / V::kStages % 2);
    if (V::kTurns || n == 1) block.turn[consumer].wait(n / 2 % 2);
    // Lets the other consumer begin: with kTurns once all wgmmas are issued, else only once, when
    // half of those of the block's first strip are.
    const auto issued = [&](int units, int of) {
      const bool now = V::kTurns ? units == of : n == 0 && units == (of + 1) / 2;
      if (now && elected) block.turn[consumer ^ 1].arrive();
    };
    float total[V::kTiles][64];
    const uint32_t pixels = uniform(shared_address(block.strips + slot * V::kStripBytes));
    if constexpr (V::kScalar) {
      issued(1, 1);
      multiply_scalar(block, pixels, total);
    } else if (n < kConsumers) {
      multiply<true>(block, pixels, total, issued);
    } else {
      multiply<false>(block, pixels, total, issued);
    }
    __syncwarp();  // all lanes have read the strip
    if (elected) block.strip_empty[slot].arrive();
    write(block, total, scale, consumer, strip);
  }
  if (threadIdx.x % kWarpgroup == 0) tma_store_wait_read();
}

template <class V>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_forward(const __grid_constant__ Parameters parameters) {
#ifdef JAXUNET_SM90A_PASS
  const Block<V> block(parameters, shared_memory());
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup < kConsumers) {
    set_registers<kConsumerRegisters, true>();
    consume(block, warpgroup);
  } else {
    set_registers<kProducerRegisters, false>();
    if (threadIdx.x % kWarpgroup == 0) produce(block);
  }
#else
  __trap();  // never launched: build.sh compiles for sm_90a only
#endif
}

}  // namespace jaxunet::cuda::fp8
