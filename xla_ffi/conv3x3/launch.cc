// Which kernel computes a convolution, and in how many shares the weight gradient's pixels are summed: the one place
// where it is decided.

#include <algorithm>

#include "hopper_tile.h"
#include "kernels.h"

namespace jaxunet::cuda {
namespace {

struct Device {
  int multiprocessors = 0;
  bool hopper = false;  // wgmma is of compute capability 9.0 alone, neither older nor newer
};

cudaError_t describe(Device* device) {
  int id = 0, major = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  device->hopper = major == 9;
  return error;
}

// The splits of the least estimated time: 0.7 µs to multiply a strip, 5 to start a block and to store its sums, 0.03 to
// add them to the others' (measured on an H200, for the Pallas kernel of the same design).
int hopper_splits(const WeightGradientCut& cut, int multiprocessors, int64_t most) {
  const auto microseconds = [&](int64_t splits) {
    const int64_t blocks = cut.blocks * splits, waves = ceil_div(blocks, multiprocessors);
    return static_cast<double>(waves) * (0.7 * static_cast<double>(ceil_div(cut.strips, splits)) + 5) +
           (splits > 1 ? 0.03 * static_cast<double>(blocks) : 0.0);
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= std::min({cut.strips, most, int64_t{multiprocessors}}); ++splits) {
    if (microseconds(splits) < microseconds(best)) best = splits;
  }
  return static_cast<int>(best);
}

}  // namespace

cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream) {
  Device device;
  const cudaError_t error = describe(&device);
  if (error != cudaSuccess) return error;
  if (device.hopper && !hopper_forward_refuses(plan)) return hopper_forward(plan, device.multiprocessors, stream);
  return portable_forward(plan, stream);
}

cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream) {
  Device device;
  cudaError_t error = describe(&device);
  if (error != cudaSuccess) return error;
  const int64_t image = plan.height * plan.width, pixels = plan.batch * image;
  const int64_t kernel = 9 * plan.x.total * plan.features, shift = plan.batch * plan.features;
  if (pixels == 0 || plan.features == 0) {
    error = cudaMemsetAsync(plan.dkernel, 0, kernel * sizeof(float), stream);
    return error == cudaSuccess ? cudaMemsetAsync(plan.dshift, 0, shift * sizeof(float), stream) : error;
  }
  // Sums that one block cannot finish go to the workspace, first those of dy.
  const int64_t blocks = plan.batch * ceil_div(plan.features, 32);
  int64_t segments = std::clamp<int64_t>(2 * device.multiprocessors / blocks, 1, ceil_div(image, 64));
  if (segments * shift > plan.workspace_floats) segments = 1;
  const int64_t used = segments > 1 ? segments * shift : 0;
  const int64_t most = std::max<int64_t>((plan.workspace_floats - used) / kernel, 1);

  const bool hopper = device.hopper && !hopper_weight_gradient_refuses(plan);
  int64_t splits;
  if (hopper) {
    splits = hopper_splits(hopper_weight_gradient_cut(plan), device.multiprocessors, most);
  } else {
    const int64_t tiles = ceil_div(9 * plan.x.total, 64) * ceil_div(plan.features, 64);
    splits = std::clamp<int64_t>(4 * device.multiprocessors / tiles, 1, std::min(most, ceil_div(pixels, 256)));
  }
  float* partial_shift = segments > 1 ? plan.workspace : plan.dshift;
  float* partial_kernel = splits > 1 ? plan.workspace + used : plan.dkernel;
  error = channel_sums(plan, static_cast<int>(segments), partial_shift, stream);
  if (error != cudaSuccess) return error;
  error = hopper ? hopper_weight_gradient(plan, static_cast<int>(splits), partial_kernel, stream)
                 : portable_weight_gradient(plan, static_cast<int>(splits), partial_kernel, stream);
  if (error != cudaSuccess) return error;
  return ordered_sums({partial_kernel, plan.dkernel, static_cast<int>(splits), splits > 1 ? kernel : 0},
                      {partial_shift, plan.dshift, static_cast<int>(segments), segments > 1 ? shift : 0}, stream);
}

}  // namespace jaxunet::cuda
