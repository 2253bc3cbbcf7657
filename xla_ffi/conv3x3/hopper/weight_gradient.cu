// The host side of the Hopper weight gradient: the division of the work, the tensor maps, the
// launch. The kernel is in weight_gradient.cuh.

#include <algorithm>
#include <memory>

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/weight_gradient.cuh"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace {

using namespace weight_gradient;

template <class T, bool kPacked>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  constexpr int kBytes = Block<T, kPacked>::kBytes;
  const auto kernel = hopper_weight_gradient_kernel<T, kPacked>;
  const cudaError_t error = allow_shared_memory(kernel, kBytes);
  const int blocks = p.kernel.blocks() + p.shortcut.blocks();
  return error == cudaSuccess ? launch(kernel, dim3(blocks), kThreads, kBytes, stream, p) : error;
}

template <class T>
cudaError_t run(const Parameters& p, cudaStream_t stream) {
  return p.samples == kPackedSamples ? run<T, true>(p, stream) : run<T, false>(p, stream);
}

// Projected chunks per block: at most `max`, divided as evenly as possible.
int chunks_of_block(int64_t chunks, int max) {
  return chunks == 0 ? 0 : static_cast<int>(ceil_div(chunks, ceil_div(chunks, max)));
}

// TMA boxes that are read in the time in which one strip of the kernel's gradient is multiplied.
// The shortcut's gradient is bound by reading its boxes: dy, and one for each chunk. Fitted on an
// H200; to refit, time convolutions with a shortcut of 1 to 6 chunks while the shortcut's share of
// the multiprocessors varies.
constexpr int kBoxesOfStrip = 5;

}  // namespace

WeightGradientTiling hopper_weight_gradient_tiling(const Conv3x3WeightGradient& plan,
                                                   int max_block_chunks) {
  const int64_t across = ceil_div(plan.features, kChunk);
  const int64_t chunks = chunks_of(plan.projected);
  WeightGradientTiling tiling{chunks_of(plan.x) * across,
                              ceil_div(plan.height, kRows) * ceil_div(plan.width, kStripColumns)};
  tiling.samples = samples_of_strip(plan.height, plan.width);
  tiling.whole_tiles = plan.features % kChunk == 0;
  for (int i = 0; i < plan.x.count; ++i)
    tiling.whole_tiles = tiling.whole_tiles && plan.x.channels[i] % kChunk == 0;
  tiling.block_chunks = chunks_of_block(chunks, max_block_chunks);
  tiling.shortcut_tiles = ceil_div(chunks, max_block_chunks) * across;
  tiling.shortcut_time = static_cast<double>(1 + tiling.block_chunks) / kBoxesOfStrip;
  tiling.shortcut_size = static_cast<double>(tiling.block_chunks) / 9;  // a chunk is one tap
  return tiling;
}

cudaError_t hopper_weight_gradient(const Conv3x3WeightGradient& plan,
                                   const WeightGradientTiling& tiling, const SplitK& split_k,
                                   float* partials, bool accumulator_tiles,
                                   const ShiftPartials& shift, const SplitK& shortcut_split_k,
                                   float* shortcut_partials, cudaStream_t stream) {
  const auto parameters = std::make_unique<Parameters>();
  Parameters& p = *parameters;
  const int samples = samples_of_strip(plan.height, plan.width);
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
  p.x_blocks = FastDivmod(std::max<int64_t>(chunks_of(plan.x), 1));
  p.kernel = Work(tiling.tiles, split_k);
  p.shortcut = Work(tiling.shortcut_tiles, shortcut_split_k);
  p.shortcut_chunks = static_cast<int>(chunks_of(plan.projected));
  p.block_chunks = tiling.block_chunks;
  p.height = static_cast<int>(plan.height);
  p.width = static_cast<int>(plan.width);
  p.strips_of_sample = FastDivmod(tiling.strips_of_sample);
  p.strips_across = FastDivmod(ceil_div(plan.width, kStripColumns));
  p.partials = partials;
  p.accumulator_tiles = accumulator_tiles;
  p.shortcut_partials = shortcut_partials;
  p.shift = shift;
  return plan.type == Type::kFloat16 ? run<__half>(p, stream) : run<__nv_bfloat16>(p, stream);
}

}  // namespace jaxunet::cuda
