// The handlers' entries: which kernel computes a plan (choice.h), and in how many shares a weight gradient's pixels are
// summed.

#include <algorithm>

#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/tile.h"
#include "conv3x3/kernels.h"

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

// In how many shares the pixels are summed.
struct Splits {
  int64_t kernel, shortcut;
};

// Where a weight gradient's partial sums lie: those of a result in the result itself if there is one split and nothing
// to narrow, else in the workspace: the kernel's, the shortcut's, and those of dy behind them.
struct Sums {
  const Conv3x3WeightGradient& plan;
  int64_t kernel, shortcut, shift;  // entries

  explicit Sums(const Conv3x3WeightGradient& plan_)
      : plan(plan_),
        kernel(9 * plan_.x.total * plan_.features),
        shortcut(plan_.projected.total * plan_.features),
        shift(plan_.batch * plan_.features) {}

  static bool direct(const Result& to, int64_t splits) { return splits == 1 && to.type == Type::kFloat32; }
  int64_t of_kernel(const Splits& splits) const {
    return direct(plan.dkernel, splits.kernel) ? 0 : splits.kernel * kernel;
  }
  int64_t of_shortcut(const Splits& splits) const {
    return direct(plan.dshortcut, splits.shortcut) ? 0 : splits.shortcut * shortcut;
  }
  bool fit(const Splits& splits, int64_t slots) const {
    return of_kernel(splits) + of_shortcut(splits) + slots * shift <= plan.workspace_floats;
  }
  float* kernel_at(const Splits& splits) const {
    return of_kernel(splits) ? plan.workspace : static_cast<float*>(plan.dkernel.data);
  }
  float* shortcut_at(const Splits& splits) const {
    return of_shortcut(splits) ? plan.workspace + of_kernel(splits) : static_cast<float*>(plan.dshortcut.data);
  }
  float* shift_at(const Splits& splits) const { return plan.workspace + of_kernel(splits) + of_shortcut(splits); }

  // Adds them up. The sum over all samples has as many parts more.
  cudaError_t add(const Splits& splits, bool tiled, int64_t slots, cudaStream_t stream) const {
    const int64_t rows = plan.shifts == 1 ? plan.batch : 1;
    // Those of dy first: few, but of many parts, they would be waited for in the end.
    return ordered_sums(
        {{shift_at(splits), plan.dshift, static_cast<int>(slots * rows), shift / rows},
         of_norm(0, plan.of_offset),
         of_norm(1, plan.of_scale),
         {shortcut_at(splits), plan.dshortcut, static_cast<int>(splits.shortcut), of_shortcut(splits) ? shortcut : 0},
         {kernel_at(splits), plan.dkernel, static_cast<int>(splits.kernel), of_kernel(splits) ? kernel : 0,
          tiled ? static_cast<int>(plan.features) : 0}},
        stream);
  }

  // Where no pixel or no feature is: zeros, but for the norm's.
  cudaError_t add_nothing(cudaStream_t stream) const {
    return ordered_sums({{nullptr, plan.dshift, 0, plan.shifts * plan.features},
                         of_norm(0, plan.of_offset),
                         of_norm(1, plan.of_scale),
                         {nullptr, plan.dshortcut, 0, shortcut},
                         {nullptr, plan.dkernel, 0, kernel}},
                        stream);
  }

 private:
  // Over the samples, which have both sums of every channel: 0 of offset, 1 of scale.
  OrderedSum of_norm(int which, float* to) const {
    if (!plan.norm) return {};
    const int64_t channels = plan.x.total;
    return {plan.norm_sums + which * channels, {to, Type::kFloat32}, static_cast<int>(2 * plan.batch), channels, 0, 2};
  }
};

int64_t strips_of(const WeightGradientCut& cut, int64_t batch) {
  return ceil_div(batch, cut.samples) * cut.strips_of_sample;
}

Shares shares_of(const WeightGradientCut& cut, int64_t batch, int64_t splits) {
  return {static_cast<int>(strips_of(cut, batch)), static_cast<int>(cut.strips_of_sample), static_cast<int>(splits)};
}

// The splits of the least estimated time: 0.7 µs to multiply a strip, 5 to start a block and to store its sums, 0.03 to
// add them to the others' (measured on an H200, for the Pallas kernel of the same design). The shortcut's blocks get
// shares that take them as long as the others, unless they are all there are.
Splits hopper_splits(const WeightGradientCut& cut, const Sums& sums, int multiprocessors) {
  const int64_t strips = strips_of(cut, sums.plan.batch);
  const bool alone = cut.blocks == 0;
  const auto both = [&](int64_t splits) {
    if (alone) return Splits{1, splits};
    const double shortcut = static_cast<double>(splits) * cut.shortcut_time;
    return Splits{splits, std::clamp<int64_t>(static_cast<int64_t>(shortcut + 0.5), 1, splits)};
  };
  const auto microseconds = [&](const Splits& splits) {
    const int64_t blocks = cut.blocks * splits.kernel + cut.shortcut_blocks * splits.shortcut;
    const int64_t waves = ceil_div(blocks, multiprocessors);
    const double strips_of_block = alone ? static_cast<double>(ceil_div(strips, splits.shortcut)) * cut.shortcut_time
                                         : static_cast<double>(ceil_div(strips, splits.kernel));
    const double added = splits.kernel * splits.shortcut > 1 ? static_cast<double>(blocks) : 0.0;
    return static_cast<double>(waves) * (0.7 * strips_of_block + 5) + 0.03 * added * (alone ? cut.shortcut_size : 1.0);
  };
  Splits best = both(1);
  for (int64_t n = 2; n <= std::min(strips, int64_t{multiprocessors}); ++n) {
    const Splits splits = both(n);
    if (microseconds(splits) < microseconds(best) && sums.fit(splits, shares_of(cut, sums.plan.batch, n).slots())) {
      best = splits;
    }
  }
  return best;
}

// Two blocks for each multiprocessor.
Splits few_splits(const WeightGradientCut& cut, const Sums& sums, int multiprocessors) {
  const int64_t strips = strips_of(cut, sums.plan.batch);
  int64_t splits = std::clamp<int64_t>(2 * multiprocessors / cut.blocks, 1, strips);
  while (splits > 1 && !sums.fit({splits, 1}, shares_of(cut, sums.plan.batch, splits).slots())) --splits;
  return {splits, 1};
}

cudaError_t portable(const Sums& sums, int multiprocessors, cudaStream_t stream) {
  const Conv3x3WeightGradient& plan = sums.plan;
  const int64_t image = plan.height * plan.width, blocks = plan.batch * ceil_div(plan.features, 64);
  int64_t segments = std::clamp<int64_t>(2 * multiprocessors / blocks, 1, ceil_div(image, 256));
  if (!sums.fit({1, 1}, segments)) segments = 1;
  const int64_t tiles = ceil_div(9 * plan.x.total + plan.projected.total, 64) * ceil_div(plan.features, 64);
  int64_t most = std::clamp<int64_t>(4 * multiprocessors / tiles, 1, ceil_div(plan.batch * image, 256));
  while (most > 1 && !sums.fit({most, most}, segments)) --most;
  const Splits splits{most, most};
  cudaError_t error = channel_sums(plan, static_cast<int>(segments), sums.shift_at(splits), stream);
  if (error == cudaSuccess) {
    error = portable_weight_gradient(plan, static_cast<int>(most), sums.kernel_at(splits), sums.shortcut_at(splits),
                                     stream);
  }
  return error == cudaSuccess ? sums.add(splits, false, segments, stream) : error;
}

}  // namespace

cudaError_t conv3x3(const Conv3x3& plan, cudaStream_t stream) {
  Device device;
  const cudaError_t error = describe(&device);
  if (error != cudaSuccess) return error;
  switch (forward_kernel(plan, device.hopper)) {
    case Kernel::kFewChannels:
      return few_channels_forward(plan, device.multiprocessors, stream);
    case Kernel::kFewFeatures:
      return few_features_forward(plan, device.multiprocessors, stream);
    case Kernel::kHopper:
      return hopper_forward(plan, device.multiprocessors, stream);
    default:
      return portable_forward(plan, stream);
  }
}

cudaError_t conv3x3_shortcut_gradient(const Conv3x3& plan, cudaStream_t stream) {
  Device device;
  cudaError_t error = describe(&device);
  if (error != cudaSuccess) return error;
  if (in_one_launch(plan, device.hopper)) return hopper_forward(plan, device.multiprocessors, stream);
  int64_t first = 0;
  for (int i = 0; i < plan.y.count && error == cudaSuccess; ++i) {
    Conv3x3 part = plan;
    part.features = plan.y.channels[i];
    part.y = {1, {plan.y.data[i]}, {part.features}, part.features};
    part.shortcut =
        static_cast<const char*>(plan.shortcut) + first * plan.projected.total * (plan.type == Type::kFloat32 ? 4 : 2);
    error = conv3x3(part, stream);
    first += part.features;
  }
  return error;
}

cudaError_t conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream) {
  Device device;
  cudaError_t error = describe(&device);
  if (error != cudaSuccess) return error;
  const Sums sums(plan);
  if (plan.batch * plan.height * plan.width == 0 || plan.features == 0) return sums.add_nothing(stream);
  const Kernel kernel = weight_gradient_kernel(plan, device.hopper);
  if (kernel == Kernel::kPortable) return portable(sums, device.multiprocessors, stream);
  const bool hopper = kernel == Kernel::kHopper;
  const WeightGradientCut cut = hopper ? hopper_weight_gradient_cut(plan) : few_weight_gradient_cut(plan);
  const Splits splits =
      hopper ? hopper_splits(cut, sums, device.multiprocessors) : few_splits(cut, sums, device.multiprocessors);
  const Shares shares = shares_of(cut, plan.batch, splits.kernel),
               shortcut_shares = shares_of(cut, plan.batch, splits.shortcut);
  const ShiftSums shift{sums.shift_at(splits), (cut.blocks > 0 ? shares : shortcut_shares).slots(),
                        static_cast<int>(plan.batch), static_cast<int>(plan.features)};
  const bool tiled = cut.whole && sums.of_kernel(splits) > 0;  // nobody but the addition reads them
  error = hopper ? hopper_weight_gradient(plan, shares, sums.kernel_at(splits), tiled, shift, shortcut_shares,
                                          sums.shortcut_at(splits), stream)
                 : few_weight_gradient(plan, shares, sums.kernel_at(splits), shift, stream);
  return error == cudaSuccess ? sums.add(splits, tiled, shift.slots, stream) : error;
}

cudaError_t linear(const Conv3x3& plan, cudaStream_t stream) { return conv3x3(plan, stream); }

cudaError_t linear_weight_gradient(const Conv3x3WeightGradient& plan, cudaStream_t stream) {
  return conv3x3_weight_gradient(plan, stream);
}

// What is chosen, checked wherever this is compiled.
namespace {

constexpr float kSomewhere = 0;

constexpr Conv3x3 example(int64_t channels, int64_t features, bool flipped, bool activation, int64_t residual) {
  Conv3x3 plan{};
  plan.type = Type::kBfloat16;
  plan.batch = 32;
  plan.height = plan.width = 64;
  plan.features = features;
  plan.flipped = flipped;
  plan.x.count = 1;
  plan.x.channels[0] = plan.x.total = channels;
  plan.residual.count = residual > 0;
  plan.residual.channels[0] = plan.residual.total = residual;
  if (activation) plan.a.data = plan.b.data = &kSomewhere;
  return plan;
}
constexpr Conv3x3WeightGradient example(int64_t channels, int64_t features, bool activation) {
  const Conv3x3 forward = example(channels, features, false, activation, 0);
  Conv3x3WeightGradient plan{};
  plan.type = forward.type;
  plan.batch = forward.batch;
  plan.height = plan.width = forward.width;
  plan.features = features;
  plan.x = forward.x;
  plan.a = plan.b = forward.a;
  return plan;
}

static_assert(forward_kernel(example(3, 64, false, false, 0), true) == Kernel::kFewChannels);
static_assert(forward_kernel(example(3, 64, true, false, 0), false) == Kernel::kFewChannels);
static_assert(forward_kernel(example(64, 3, false, true, 0), true) == Kernel::kFewFeatures);
static_assert(forward_kernel(example(64, 3, true, false, 0), false) == Kernel::kFewFeatures);
static_assert(forward_kernel(example(3, 64, false, false, 64), true) == Kernel::kPortable);
static_assert(forward_kernel(example(64, 64, false, true, 64), true) == Kernel::kHopper);
static_assert(forward_kernel(example(64, 64, false, true, 64), false) == Kernel::kPortable);
static_assert(weight_gradient_kernel(example(3, 64, false), true) == Kernel::kFewChannels);
static_assert(weight_gradient_kernel(example(64, 3, true), true) == Kernel::kFewFeatures);
static_assert(weight_gradient_kernel(example(64, 64, true), true) == Kernel::kHopper);
static_assert(weight_gradient_kernel(example(20, 3, true), true) == Kernel::kPortable);

// 64 channels, projected to `first` + `second`: the gradient by a shortcut's input.
constexpr Conv3x3 projection(int64_t first, int64_t second) {
  Conv3x3 plan = example(0, first + second, true, false, 0);
  plan.x = {};
  plan.projected = {1, {}, {64}, 64};
  plan.shortcut = &kSomewhere;
  plan.y = {2, {}, {first, second}, first + second};
  return plan;
}
static_assert(forward_kernel(projection(128, 64), true) == Kernel::kHopper && in_one_launch(projection(128, 64), true));
static_assert(!in_one_launch(projection(128, 64), false) && !in_one_launch(projection(72, 64), true));
static_assert(in_one_launch(projection(64, 72), true) && !in_one_launch(projection(64, 20), true));

// Few channels or features make no other kernel of a linear layer.
constexpr Conv3x3WeightGradient linear_gradient(int64_t channels, int64_t features) {
  Conv3x3WeightGradient plan = example(0, features, false);
  plan.x = {};
  plan.projected = {1, {}, {channels}, channels};
  return plan;
}
static_assert(forward_kernel(projection(8, 0), true) == Kernel::kHopper);
static_assert(weight_gradient_kernel(linear_gradient(8, 8), true) == Kernel::kHopper);
static_assert(weight_gradient_kernel(linear_gradient(8, 8), false) == Kernel::kPortable);
static_assert(weight_gradient_kernel(linear_gradient(8, 3), true) == Kernel::kPortable);

// At every tap, the columns that a packed strip's product keeps are the pixels under it, in the order of the box that
// is stored, and the last column is the box's last pixel.
template <int samples>
constexpr bool keeps_pixels() {
  using Packed = Cut<4, 64, 1, 3, true, false, samples>;
  for (int tap = 0; tap < 9; ++tap) {
    for (int pixel = 0; pixel < Packed::kPixels; ++pixel) {
      const int sample = pixel % samples, column = pixel / samples % 4, row = pixel / samples / 4;
      const int read = Packed::tap_row(tap) + Packed::kept_eight(pixel / 8) * 8 + pixel % 8;
      if (read != ((row + tap / 3) * 6 + column + tap % 3) * samples + sample) return false;
    }
  }
  return (Packed::tap_row(8) + Packed::kColumns) * kRowBytes == Packed::kBoxBytes && Packed::kTile.fits(4, 4) &&
         !Packed::kTile.fits(4, 8);
}
static_assert(keeps_pixels<4>() && keeps_pixels<8>());

// How many samples a convolution of 4 × 4 pixels packs on a GPU of 132 multiprocessors: so many that the tests of
// packed strips (PACKED in parity_test.py) meet them.
constexpr int samples_at_4x4(int64_t batch, int chunks, int extras, int64_t features) {
  return kTiles[quickest_tile(false, 132, batch, 4, 4, chunks, extras, features)].samples;
}
static_assert(samples_at_4x4(19, 2, 0, 520) == 4 && samples_at_4x4(59, 2, 3, 520) == 8);
static_assert(samples_at_4x4(59, 2, 0, 520) == 8 && samples_at_4x4(32, 4, 0, 256) == 1);

}  // namespace
}  // namespace jaxunet::cuda
