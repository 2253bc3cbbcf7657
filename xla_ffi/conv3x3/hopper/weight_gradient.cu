// The host side of the Hopper weight gradient: the division of the work, the tensor maps, the
// launch. The kernel is in weight_gradient.cuh.

#include <algorithm>
#include <memory>
#include <vector>

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/weight_gradient.cuh"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace {

using namespace weight_gradient;

template <class T, bool kPacked, class Launch>
cudaError_t run(const Launch& all, cudaStream_t stream) {
  constexpr int kBytes = Block<T, kPacked>::kBytes;
  const auto kernel = hopper_weight_gradient_kernel<T, kPacked, Launch>;
  const cudaError_t error = allow_shared_memory(kernel, kBytes);
  const dim3 grid(static_cast<unsigned>(all.ranges.blocks));
  return error == cudaSuccess ? launch(kernel, grid, kThreads, kBytes, stream, all) : error;
}

template <class T, class Launch>
cudaError_t run(const Launch& all, cudaStream_t stream) {
  return all.members[0].samples == kPackedSamples ? run<T, true>(all, stream)
                                                  : run<T, false>(all, stream);
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

namespace {

// Encodes the tensor maps of a member, from maps[at] on, and fills in its parameters.
cudaError_t fill(const HopperWeightGradient& gradient, Member& p, CUtensorMap* maps, int& at) {
  const Conv3x3WeightGradient& plan = *gradient.plan;
  const WeightGradientTiling& tiling = gradient.tiling;
  const int samples = samples_of_strip(plan.height, plan.width);
  cudaError_t error = cudaSuccess;
  const auto image = [&](const void* data, int64_t channels, int halo) {
    const bool packed = samples == kPackedSamples;
    const int rows = packed ? kPackedStrip.rows : kRows / samples;
    const int columns = packed ? kPackedStrip.strip_columns() : kStripColumns;
    if (error == cudaSuccess)
      error = image_map(&maps[at], plan.type, data, {plan.batch, plan.height, plan.width, channels},
                        {samples, rows + halo, columns + halo, kChunk}, packed);
    return at++;
  };
  const auto images = [&](Image* to, const Parts& parts, int halo) {
    to->maps = at;
    to->parts = parts.count;
    to->total = static_cast<int>(parts.total);
    for (int i = 0; i < parts.count; ++i) {
      to->channels[i] = static_cast<int>(parts.channels[i]);
      image(parts.data[i], parts.channels[i], halo);
    }
  };
  images(&p.x, plan.x, 2);
  images(&p.projected, plan.projected, 0);
  p.dy = image(plan.dy, plan.features, 0);
  p.samples = samples;
  p.features = static_cast<int>(plan.features);
  p.feature_blocks = FastDivmod(ceil_div(plan.features, kChunk));
  p.x_blocks = FastDivmod(std::max<int64_t>(chunks_of(plan.x), 1));
  p.kernel = Work(tiling.tiles, gradient.split_k);
  p.shortcut = Work(tiling.shortcut_tiles, gradient.shortcut_split_k);
  p.shortcut_chunks = static_cast<int>(chunks_of(plan.projected));
  p.block_chunks = tiling.block_chunks;
  p.height = static_cast<int>(plan.height);
  p.width = static_cast<int>(plan.width);
  p.strips_of_sample = FastDivmod(tiling.strips_of_sample);
  p.strips_across = FastDivmod(ceil_div(plan.width, kStripColumns));
  p.partials = gradient.partials;
  p.accumulator_tiles = gradient.accumulator_tiles;
  p.shortcut_partials = gradient.shortcut_partials;
  p.shift = gradient.shift;
  return error;
}

// Launches as many members, from `begin` on, as have room in one `Launch` and the same samples per
// strip, and moves `begin` past them.
template <class Launch>
cudaError_t run_some(const std::vector<HopperWeightGradient>& gradients, size_t& begin,
                     cudaStream_t stream) {
  const auto all = std::make_unique<Launch>();
  const Type type = gradients[begin].plan->type;
  const int64_t samples = gradients[begin].tiling.samples;
  int maps = 0;
  for (; begin < gradients.size() && !all->ranges.full(); ++begin) {
    const HopperWeightGradient& next = gradients[begin];
    const int more = next.plan->x.count + next.plan->projected.count + 1;
    if (next.tiling.samples != samples || maps + more > Launch::kMostMaps) break;
    Member& member = all->members[all->ranges.jobs];
    const cudaError_t error = fill(next, member, all->maps, maps);
    if (error != cudaSuccess) return error;
    all->ranges.add(member.blocks());
  }
  return type == Type::kFloat16 ? run<__half>(*all, stream) : run<__nv_bfloat16>(*all, stream);
}

}  // namespace

cudaError_t hopper_weight_gradients(const std::vector<HopperWeightGradient>& gradients,
                                    cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t begin = 0; begin < gradients.size() && error == cudaSuccess;) {
    error = gradients.size() == 1 ? run_some<Alone>(gradients, begin, stream)
                                  : run_some<Group>(gradients, begin, stream);
  }
  return error;
}

}  // namespace jaxunet::cuda
