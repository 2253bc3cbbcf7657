// The host side of the weight gradient by phases: the division of the work, the tensor maps, the
// launches. The kernel is in upsampled_weight_gradient.cuh.
#include <algorithm>
#include <memory>

#include "common/launch.cuh"
#include "conv3x3/hopper/phase_maps.h"
#include "conv3x3/hopper/upsampled_weight_gradient.cuh"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace {

using namespace weight_gradient;

template <class T, bool kPacked>
cudaError_t run(const UpsampledParameters& p, cudaStream_t stream) {
  using Block = UpsampledBlock<T, kPacked>;
  const auto kernel = hopper_upsampled_weight_gradient_kernel<T, kPacked>;
  const cudaError_t error = allow_shared_memory(kernel, Block::kBytes);
  return error == cudaSuccess
             ? launch(kernel, dim3(p.kernel.blocks()), Block::kThreads, Block::kBytes, stream, p)
             : error;
}

template <class T>
cudaError_t run(const UpsampledParameters& p, cudaStream_t stream) {
  return p.samples == kPackedSamples ? run<T, true>(p, stream) : run<T, false>(p, stream);
}

// Number of floats in the partial results.
int64_t partial_floats(const UpsampledWeightGradient& plan, const SplitK& split_k) {
  return 16 * plan.channels * plan.features * split_k.splits +
         2 * plan.batch * plan.features * split_k.slots();
}

// The number of splits with the least estimated time among those that fit in the workspace.
SplitK quickest_split(const UpsampledWeightGradient& plan, int64_t tiles, int64_t strips,
                      int64_t strips_of_sample, int multiprocessors) {
  // Microseconds for a strip, to start a block and store its partial results, and to reduce those.
  // The first is an estimate of the time to read a strip from L2, which limits this kernel. The
  // other two are those of splits.cc, which says how to fit them; they have not been fitted to this
  // kernel.
  constexpr double kStripTime = 0.9, kBlockTime = 5, kReduceTime = 0.03;
  const auto splits_of = [&](int64_t splits) {
    return SplitK{static_cast<int>(strips), static_cast<int>(strips_of_sample),
                  static_cast<int>(splits)};
  };
  const auto microseconds = [&](int64_t splits) {
    const int64_t blocks = tiles * splits, waves = ceil_div(blocks, multiprocessors);
    return static_cast<double>(waves) *
               (kStripTime * static_cast<double>(ceil_div(strips, splits)) + kBlockTime) +
           kReduceTime * static_cast<double>(blocks);
  };
  int64_t best = 1;
  for (int64_t n = 2; n <= std::min(strips, int64_t{multiprocessors}); ++n) {
    if (microseconds(n) < microseconds(best) &&
        partial_floats(plan, splits_of(n)) <= plan.workspace_floats)
      best = n;
  }
  return splits_of(best);
}

cudaError_t maps(const UpsampledWeightGradient& plan, int samples, UpsampledParameters* p) {
  const bool packed = samples == kPackedSamples;
  const int rows = packed ? kPackedStrip.rows : kRows / samples;
  const int columns = packed ? kPackedStrip.strip_columns() : kStripColumns;
  const Nhwc x{plan.batch, plan.height, plan.width, plan.channels},
      dy{plan.batch, plan.height, plan.width, plan.features};
  const cudaError_t error =
      image_map(&p->x, plan.type, plan.x, x, {samples, rows + 2, columns + 2, kChunk}, packed);
  return error == cudaSuccess
             ? phase_maps(p->dy, plan.type, plan.dy, dy, {samples, rows, columns, kChunk}, packed)
             : error;
}

}  // namespace

cudaError_t hopper_upsampled_weight_gradient(const UpsampledWeightGradient& plan,
                                             int multiprocessors, cudaStream_t stream) {
  if (plan.batch == 0) return fold_upsampled(plan, {}, stream);
  const auto parameters = std::make_unique<UpsampledParameters>();
  UpsampledParameters& p = *parameters;
  p.samples = samples_of_strip(plan.height, plan.width);
  cudaError_t error = maps(plan, p.samples, &p);
  if (error != cudaSuccess) return error;
  const int64_t x_blocks = plan.channels / kChunk, feature_blocks = plan.features / kChunk,
                across = ceil_div(plan.width, kStripColumns),
                of_sample = ceil_div(plan.height, kRows) * across,
                tiles = 2 * x_blocks * feature_blocks,
                strips = ceil_div(plan.batch, p.samples) * of_sample;
  const SplitK split_k = quickest_split(plan, tiles, strips, of_sample, multiprocessors);
  p.features = static_cast<int>(plan.features);
  p.feature_blocks = FastDivmod(feature_blocks);
  p.x_blocks = FastDivmod(x_blocks);
  p.kernel = Work(tiles, split_k);
  p.height = static_cast<int>(plan.height);
  p.width = static_cast<int>(plan.width);
  p.strips_of_sample = FastDivmod(of_sample);
  p.strips_across = FastDivmod(across);
  p.partials = plan.workspace;
  p.shift = {plan.workspace + tiles * UpsampledTile::kEntries * split_k.splits, split_k.slots(),
             static_cast<int>(plan.batch), p.features};
  error = plan.type == Type::kFloat16 ? run<__half>(p, stream) : run<__nv_bfloat16>(p, stream);
  if (error != cudaSuccess) return error;
  return fold_upsampled(plan, {p.partials, p.shift.to, split_k.splits, p.shift.slots}, stream);
}

}  // namespace jaxunet::cuda
