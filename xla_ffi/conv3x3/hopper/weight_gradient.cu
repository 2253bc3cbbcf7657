// Hopper's weight gradient: its kernel, whose blocks are in hopper_weight_gradient.cuh, and the host's side: how it is
// cut, the copy engine's maps, the launch.

#include <algorithm>
#include <memory>

#include "conv3x3/hopper/weight_gradient.cuh"
#include "conv3x3/kernels.h"
#include "common/launch.cuh"
#include "common/tensor_map.h"

namespace jaxunet::cuda {
namespace {

using namespace weight_gradient;

template <class T, bool kActivated, bool kPacked>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_weight_gradient_kernel(const __grid_constant__ Parameters parameters) {
#ifdef JAXUNET_HOPPER
  const Block<T, kPacked> block(parameters, shared_memory());
  if (threadIdx.x == 0) {
    block.init();
    publish_barriers();
  }
  if (threadIdx.x == kThreads - 1) block.prefetch();
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < kTapRows) {
    set_registers<kComputingRegisters<kActivated>, true>();
    if (block.chunks) {
      block.compute_projected(warpgroup);
    } else {
      block.compute(warpgroup, kActivated ? block.ready : block.full);
    }
  } else {
    set_registers<kHelpingRegisters<kActivated>, false>();
    const int thread = threadIdx.x % 128;
    if (thread == 0) {
      if (block.chunks) {
        block.load_projected();
      } else {
        block.load();
      }
    }
    if (thread >= 128 - kHelpers && (block.sums_dy || (kActivated && !block.chunks))) block.template help<kActivated>();
  }
#endif
}

template <class T, bool kActivated, bool kPacked>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  constexpr int kBytes = Block<T, kPacked>::kBytes;
  const auto kernel = hopper_weight_gradient_kernel<T, kActivated, kPacked>;
  const cudaError_t error = allow_shared_memory(kernel, kBytes);
  const int blocks = p.kernel.blocks() + p.shortcut.blocks();
  return error == cudaSuccess ? launch(kernel, dim3(blocks), kThreads, kBytes, stream, p) : error;
}

template <class T>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  if (p.samples == kPackedSamples) return run<T, false, true>(p, stream);
  return p.a.data ? run<T, true, false>(p, stream) : run<T, false, false>(p, stream);
}

int chunks_in(const Parts& parts) {
  int64_t count = 0;
  for (int i = 0; i < parts.count; ++i) count += ceil_div(parts.channels[i], kChunk);
  return static_cast<int>(count);
}

// Images of at most four rows would leave half of a strip empty, those of four columns as well three quarters. Their
// activation, which differs from sample to sample, is not worth its code: at so few pixels it is a kernel of its own.
int samples_of_strip(const Conv3x3WeightGradient& plan) {
  if (plan.height > kRows / kPaired || plan.a.data) return 1;
  return kPackedStrip.fits(plan.height, plan.width) ? kPackedSamples : kPaired;
}

// As even as they can be.
int chunks_of_block(const Parts& projected) {
  const int64_t chunks = chunks_in(projected), blocks = ceil_div(chunks, kMostChunks);
  return chunks == 0 ? 0 : static_cast<int>(ceil_div(chunks, blocks));
}

}  // namespace

WeightGradientCut hopper_weight_gradient_cut(const Conv3x3WeightGradient& plan) {
  const int64_t across = ceil_div(plan.features, kChunk), chunks = chunks_in(plan.projected);
  WeightGradientCut cut{chunks_in(plan.x) * across, ceil_div(plan.height, kRows) * ceil_div(plan.width, kStripColumns)};
  cut.samples = samples_of_strip(plan);
  cut.whole = plan.features % kChunk == 0;
  for (int i = 0; i < plan.x.count; ++i) cut.whole = cut.whole && plan.x.channels[i] % kChunk == 0;
  cut.shortcut_blocks = ceil_div(chunks, kMostChunks) * across;
  // Reading its boxes is what takes the time: an estimated seventh each of that of a strip's products.
  cut.shortcut_time = static_cast<double>(1 + chunks_of_block(plan.projected)) / 7;
  cut.shortcut_size = static_cast<double>(chunks_of_block(plan.projected)) / 9;
  return cut;
}

cudaError_t hopper_weight_gradient(const Conv3x3WeightGradient& plan, const Shares& shares, float* sums, bool tiled,
                                   const ShiftSums& shift, const Shares& shortcut_shares, float* shortcut_sums,
                                   cudaStream_t stream) {
  const auto parameters = std::make_unique<Parameters>();
  Parameters& p = *parameters;
  const WeightGradientCut cut = hopper_weight_gradient_cut(plan);
  const int samples = samples_of_strip(plan);
  cudaError_t error = cudaSuccess;
  const auto image = [&](CUtensorMap* map, const void* data, int64_t channels, int halo) {
    if (error != cudaSuccess) return;
    const bool packed = samples == kPackedSamples;
    const int rows = packed ? kPackedStrip.rows : kRows / samples;
    const int columns = packed ? kPackedStrip.strip_columns() : kStripColumns;
    error = image_map(map, plan.type, data, {plan.batch, plan.height, plan.width, channels},
                      {samples, rows + halo, columns + halo, kChunk}, packed);
  };
  const auto images = [&](Image* to, const Parts& parts, int halo) {
    to->parts = parts.count;
    to->total = static_cast<int>(parts.total);
    for (int i = 0; i < parts.count; ++i) {
      to->channels[i] = static_cast<int>(parts.channels[i]);
      image(&to->maps[i], parts.data[i], parts.channels[i], halo);
    }
  };
  images(&p.x, plan.x, 2);
  images(&p.projected, plan.projected, 0);
  image(&p.dy, plan.dy, plan.features, 0);
  if (error != cudaSuccess) return error;
  p.samples = samples;
  p.features = static_cast<int>(plan.features);
  p.feature_blocks = FastDivmod(ceil_div(plan.features, kChunk));
  p.x_blocks = FastDivmod(std::max(chunks_in(plan.x), 1));
  p.kernel = Work(cut.blocks, shares);
  p.shortcut = Work(cut.shortcut_blocks, shortcut_shares);
  p.shortcut_chunks = chunks_in(plan.projected);
  p.block_chunks = chunks_of_block(plan.projected);
  p.height = static_cast<int>(plan.height);
  p.width = static_cast<int>(plan.width);
  p.strips_of_sample = FastDivmod(cut.strips_of_sample);
  p.strips_across = FastDivmod(ceil_div(plan.width, kStripColumns));
  p.a = plan.a;
  p.b = plan.b;
  p.sums = sums;
  p.tiled = tiled;
  p.shortcut_sums = shortcut_sums;
  p.shift = shift;
  return plan.type == Type::kFloat16 ? run<__half>(p, stream) : run<__nv_bfloat16>(p, stream);
}

}  // namespace jaxunet::cuda
