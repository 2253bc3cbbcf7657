// Weight gradient of the 3×3 convolution on Hopper: dW[i, j, c, f] = sum over pixels of act(x) shifted by (i - 1, j -
// 1), times dy.
//
// A block owns 64 input × 64 output channels, all nine taps (147 KB of float32, in registers), and a share of the
// pixels. A warpgroup copies strips of 8 × 8 pixels into a ring in shared memory: dy, and x with one pixel of halo.
// Both operands of wgmma are read across K: channels are contiguous and the pixels are K. Three warpgroups own a row of
// taps each: tap (i, j) is the haloed x at a shifted address, and as the distance between two 64-channel columns of the
// right operand is free, it is set to one pixel: one wgmma of 64 × 192 multiplies dy by the three taps of a row at
// once. Three warps beside the one that copies apply the activation, where there is one, to x in place; and in the
// blocks of the first input channels they sum dy, which is at hand.
//
// The shares' sums are added afterwards, in order: no atomics, the same bits in every run.

#include <memory>

#include "hopper_activation.cuh"
#include "hopper_instructions.cuh"
#include "hopper_tile.h"
#include "kernels.h"
#include "launch.cuh"
#include "shares.h"
#include "tensor_map.h"
#include "wgmma.cuh"

namespace jaxunet::cuda {
namespace {

constexpr int kRows = 8, kTapRows = 3, kStages = 8;
constexpr int kXBytes = Tile{kRows, 0, 1, 1, false, false}.strip_bytes(), kDyBytes = kRows * kStripColumns * kRowBytes;
constexpr int kHelpers = 96, kHelperPixels = kHelpers / 8;  // the threads of three warps; eight of them read a pixel
constexpr int kBytes = kStages * (kXBytes + kDyBytes) + kBarrierBytes + kHelperPixels * kChunk * 4;
static_assert(kBytes <= kSharedBytes);

struct Parameters {
  CUtensorMap x[kMaxParts], dy;
  int x_parts, x_channels[kMaxParts], channels, features, feature_blocks,
      blocks;  // blocks: 64 × 64 tiles of the gradient
  int height, width, strips_down, strips_across;
  Shares shares;
  Rows a, b;
  float* sums;
  ShiftSums shift;
};

constexpr int kThreads = 128 * (kTapRows + 1);
// Registers a thread, of the 4 · 128 that a multiprocessor has for the four warpgroups.
template <bool kActivated>
constexpr int kComputingRegisters = kActivated ? 136 : 152;
template <bool kActivated>
constexpr int kHelpingRegisters = kActivated ? 104 : 56;

template <class T>
struct Block {
  static constexpr int kXBoxBytes = (kRows + 2) * kHaloColumns * kRowBytes;

  const Parameters& p;
  unsigned char *x, *dy;
  Barrier *full, *ready, *empty;
  float* scratch;                                    // (kHelperPixels, 64)
  int split, part, channel, first_channel, feature;  // channel: in its part; first_channel: of the part in the whole
  int first, count;                                  // strips
  bool sums_dy;

  __device__ Block(const Parameters& parameters, unsigned char* shared) : p(parameters) {
    x = shared;
    dy = x + kStages * kXBytes;
    full = reinterpret_cast<Barrier*>(dy + kStages * kDyBytes);
    ready = full + kStages;
    empty = ready + kStages;
    scratch = reinterpret_cast<float*>(dy + kStages * kDyBytes + kBarrierBytes);
    // Neighbours share the pixels, which then come from L2.
    split = blockIdx.x / p.blocks;
    const int block = blockIdx.x - split * p.blocks, x_block = block / p.feature_blocks;
    feature = (block - x_block * p.feature_blocks) * kChunk;
    channel = x_block * kChunk;
    part = first_channel = 0;
    while (part + 1 < p.x_parts && channel >= p.x_channels[part]) {
      channel -= (p.x_channels[part] + kChunk - 1) / kChunk * kChunk;
      first_channel += p.x_channels[part++];
    }
    first = p.shares.first(split);
    count = p.shares.count(split);
    sums_dy = x_block == 0;
  }

  __device__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      ready[i].init(kHelpers);
      empty[i].init(4 * kTapRows + (sums_dy ? kHelpers / 32 : 0));
    }
  }

  __device__ Strip strip_at(int strip) const {
    const int each = p.strips_down * p.strips_across, sample = strip / each, rest = strip - sample * each,
              down = rest / p.strips_across;
    return {sample, down * kRows, (rest - down * p.strips_across) * kStripColumns};
  }

  __device__ void load() const {
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      empty[stage].wait(i / kStages % 2 ^ 1);  // at once the first time round
      full[stage].expect(kXBoxBytes + kDyBytes);
      const Strip at = strip_at(first + i);
      load_box(dy + stage * kDyBytes, &p.dy, &full[stage], feature, at.column, at.row, at.sample);
      load_box(x + stage * kXBytes, &p.x[part], &full[stage], channel, at.column - 1, at.row - 1, at.sample);
    }
  }

  // Three warps: what can be done beside the products.
  template <bool kActivated>
  __device__ void help() const {
    const int thread = threadIdx.x % 128 - (128 - kHelpers), eighth = thread % 8, c = channel + eighth * 8;
    Coefficients coefficients;
    float totals[8];
    int of_sample = -1;
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      const Strip at = strip_at(first + i);
      if (at.sample != of_sample) {
        if constexpr (kActivated)
          coefficients = Coefficients(p.a, p.b, at.sample, first_channel + c, c < p.x_channels[part]);
        if (sums_dy && of_sample >= 0) store_shift(totals, thread, of_sample);
#pragma unroll
        for (int n = 0; n < 8; ++n) totals[n] = 0;
        of_sample = at.sample;
      }
      full[stage].wait(i / kStages % 2);
      if constexpr (kActivated) {
        activate_strip<T, kRows, kHelpers>(x + stage * kXBytes, at, p.height, p.width, thread, coefficients);
        fence_async();
        ready[stage].arrive();
      }
      if (!sums_dy) continue;
      for (int pixel = thread / 8; pixel < kRows * kStripColumns; pixel += kHelperPixels) {
        Eight<T> values;
        values.load(
            reinterpret_cast<const T*>(dy + stage * kDyBytes + pixel * kRowBytes + ((eighth ^ pixel % 8) << 4)));
#pragma unroll
        for (int n = 0; n < 8; ++n) totals[n] += wide(values.at[n]);
      }
      __syncwarp();
      if (thread % 32 == 0) empty[stage].arrive();
    }
    if (sums_dy && of_sample >= 0) store_shift(totals, thread, of_sample);
  }

  // Adds the helpers' sums of a sample, in order.
  __device__ void store_shift(const float (&totals)[8], int thread, int sample) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) scratch[thread / 8 * kChunk + thread % 8 * 8 + n] = totals[n];
    meet(1, kHelpers);
    if (thread < kChunk && feature + thread < p.features) {
      float total = 0;
      for (int i = 0; i < kHelperPixels; ++i) total += scratch[i * kChunk + thread];
      p.shift.store(p.shares, split, sample, feature + thread, total);
    }
    meet(1, kHelpers);
  }

  __device__ void compute(int tap_row, Barrier* filled) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    float sums[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) sums[i] = 0;
    int held = -1;
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      filled[stage].wait(i / kStages % 2);
      const uint64_t left = matrix(shared_address(dy + stage * kDyBytes), 8 * kRowBytes);
      const uint64_t right = matrix(shared_address(x + stage * kXBytes) + tap_row * kHaloColumns * kRowBytes,
                                    kHaloColumns * kRowBytes, kRowBytes);
      begin_products();
#pragma unroll
      for (int k = 0; k < kRows / 2; ++k) {  // two image rows: 16 pixels
        Product<T, true, true, 192>::run(sums, advance(left, 16 * kRowBytes * k),
                                         advance(right, 2 * kHaloColumns * kRowBytes * k), true);
      }
      commit_products();
      wait_products<1>();
      if (held >= 0 && lane == 0) empty[held].arrive();
      held = stage;
    }
    wait_products<0>();
    settle(sums);

    // Eight lanes hold eight neighbours along the features: a sector of 32 bytes.
    float* to = p.sums + static_cast<int64_t>(split) * 9 * p.channels * p.features;
#pragma unroll
    for (int j = 0; j < 24; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int f = feature + 16 * warp + lane / 4 + i / 2 * 8, c = channel + j % 8 * 8 + lane % 4 * 2 + i % 2;
        if (f < p.features && c < p.x_channels[part]) {
          to[(static_cast<int64_t>(3 * tap_row + j / 8) * p.channels + first_channel + c) * p.features + f] =
              sums[4 * j + i];
        }
      }
    }
  }
};

template <class T, bool kActivated>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_weight_gradient_kernel(const __grid_constant__ Parameters parameters) {
#ifdef JAXUNET_HOPPER
  const Block<T> block(parameters, shared_memory());
  if (threadIdx.x == 0) {
    block.init();
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < kTapRows) {
    set_registers<kComputingRegisters<kActivated>, true>();
    block.compute(warpgroup, kActivated ? block.ready : block.full);
  } else {
    set_registers<kHelpingRegisters<kActivated>, false>();
    const int thread = threadIdx.x % 128;
    if (thread == 0) block.load();
    if (thread >= 128 - kHelpers && (kActivated || block.sums_dy)) block.template help<kActivated>();
  }
#endif
}

template <class T, bool kActivated>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  const auto kernel = hopper_weight_gradient_kernel<T, kActivated>;
  const cudaError_t error = allow_shared_memory(kernel, kBytes);
  return error == cudaSuccess ? launch(kernel, dim3(p.blocks * p.shares.splits), kThreads, kBytes, stream, p) : error;
}

}  // namespace

WeightGradientCut hopper_weight_gradient_cut(const Conv3x3WeightGradient& plan) {
  WeightGradientCut cut{0, ceil_div(plan.height, kRows) * ceil_div(plan.width, kStripColumns)};
  for (int i = 0; i < plan.x.count; ++i)
    cut.blocks += ceil_div(plan.x.channels[i], kChunk) * ceil_div(plan.features, kChunk);
  return cut;
}

cudaError_t hopper_weight_gradient(const Conv3x3WeightGradient& plan, const Shares& shares, float* sums,
                                   const ShiftSums& shift, cudaStream_t stream) {
  const auto parameters = std::make_unique<Parameters>();
  Parameters& p = *parameters;
  const WeightGradientCut cut = hopper_weight_gradient_cut(plan);
  p.x_parts = plan.x.count;
  cudaError_t error = cudaSuccess;
  const auto image = [&](CUtensorMap* map, const void* data, int64_t channels, int halo) {
    if (error != cudaSuccess) return;
    error = tensor_map(map, plan.type, data, {channels, plan.width, plan.height, plan.batch},
                       {kChunk, kStripColumns + halo, kRows + halo, 1});
  };
  for (int i = 0; i < plan.x.count; ++i) {
    p.x_channels[i] = static_cast<int>(plan.x.channels[i]);
    image(&p.x[i], plan.x.data[i], plan.x.channels[i], 2);
  }
  image(&p.dy, plan.dy, plan.features, 0);
  if (error != cudaSuccess) return error;
  p.channels = static_cast<int>(plan.x.total);
  p.features = static_cast<int>(plan.features);
  p.feature_blocks = static_cast<int>(ceil_div(plan.features, kChunk));
  p.blocks = static_cast<int>(cut.blocks);
  p.height = static_cast<int>(plan.height);
  p.width = static_cast<int>(plan.width);
  p.strips_down = static_cast<int>(ceil_div(plan.height, kRows));
  p.strips_across = static_cast<int>(ceil_div(plan.width, kStripColumns));
  p.shares = shares;
  p.a = plan.a;
  p.b = plan.b;
  p.sums = sums;
  p.shift = shift;
  if (plan.type == Type::kFloat16) return plan.a.data ? run<__half, true>(p, stream) : run<__half, false>(p, stream);
  return plan.a.data ? run<__nv_bfloat16, true>(p, stream) : run<__nv_bfloat16, false>(p, stream);
}

}  // namespace jaxunet::cuda
