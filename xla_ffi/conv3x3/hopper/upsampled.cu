// The host side of the Hopper convolution of upsampled images: the choice of a tile and the tensor
// maps. The kernel is in forward.cuh, its instances in upsampled_instances.cuh.
#include "conv3x3/hopper/phase_maps.h"
#include "conv3x3/hopper/upsampled.h"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace forward {
namespace {

NhwcBox box_of(const Tile& tile, int halo) {
  return {tile.samples, tile.rows + halo, tile.strip_columns() + halo, kChunk};
}

}  // namespace

cudaError_t parameters(const Tile& tile, const UpsampledConv3x3& plan, Parameters* p) {
  set_schedule(phase_schedule(tile, plan.flipped, plan.batch, plan.height, plan.width,
                              plan.channels, plan.features),
               p);
  p->phase = FastDivmod(plan.flipped ? plan.channels / kChunk : plan.features);
  p->features = static_cast<int>(plan.features);
  p->residual = false;
  p->shift = plan.shift;
  p->projected_parts = 0;
  p->x_parts = plan.flipped ? kPhases : 1;
  p->y_parts = plan.flipped ? 1 : kPhases;
  for (int i = 0; i < p->x_parts; ++i) p->x_channels[i] = static_cast<int>(plan.channels);
  for (int i = 0; i < p->y_parts; ++i) p->y_channels[i] = static_cast<int>(plan.features);
  const Nhwc x{plan.batch, plan.height, plan.width, plan.channels},
      y{plan.batch, plan.height, plan.width, plan.features};
  const NhwcBox of_x = box_of(tile, 2), of_y = box_of(tile, 0);  // x with one pixel on either side
  static_assert(kPhases <= kMaxParts, "a phase is a part");
  const bool packed = tile.packed();
  constexpr int64_t kTaps = 16;  // 2 × 2 for each of four phases
  cudaError_t error;
  if (plan.flipped) {
    error = phase_maps(p->maps.x, plan.type, plan.x, x, of_x, packed);
    if (error == cudaSuccess) error = image_map(&p->maps.y[0], plan.type, plan.y, y, of_y, packed);
    if (error == cudaSuccess) {
      error = tensor_map(&p->maps.kernel, plan.type, plan.kernel,
                         {plan.channels, plan.features, kTaps}, {kChunk, tile.features, tile.taps});
    }
  } else {
    error = phase_maps(p->maps.y, plan.type, plan.y, y, of_y, packed);
    if (error == cudaSuccess) error = image_map(&p->maps.x[0], plan.type, plan.x, x, of_x, packed);
    if (error == cudaSuccess) {
      error = tensor_map(&p->maps.kernel, plan.type, plan.kernel,
                         {plan.features, plan.channels, kTaps}, {kChunk, kChunk, tile.taps});
    }
  }
  return error;
}

}  // namespace forward

cudaError_t hopper_upsampled(const UpsampledConv3x3& plan, int multiprocessors,
                             cudaStream_t stream) {
  if (plan.batch == 0) return cudaSuccess;  // there is no tensor map of an empty array
  const int tile = quickest_phase_tile(multiprocessors, plan.flipped, plan.batch, plan.height,
                                       plan.width, plan.channels, plan.features);
  const auto& all =
      plan.type == Type::kFloat16 ? forward::kUpsampledFloat16 : forward::kUpsampledBfloat16;
  return (plan.flipped ? all.flipped : all.forward)[tile](plan, multiprocessors, stream);
}

}  // namespace jaxunet::cuda
