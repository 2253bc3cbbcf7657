// Forward 3×3 convolution, its input gradient and the linear layer as an implicit GEMM with a ring
// of stages (multistage_tile.cuh): 16-bit types, channels and features in multiples of 8, no
// activation, compute capability 8.0 and later.
//
// K runs over the parts of x, within a part over the taps, within a tap over chunks of channels;
// then over the parts of `projected`, which have one tap. So a thread only increments its
// addresses, and it computes only once the masks of its pixels that have neighbours inside of the
// image.
//
// Shared memory: the ring; a stage holds a tile of A, K-major, and one of B, MN-major (K-major if
// flipped). Grid: tiles of pixels × tiles of features, features first.

#include <climits>

#include "common/dispatch_dtype.cuh"
#include "common/fast_divmod.h"
#include "conv3x3/channels.cuh"
#include "conv3x3/dispatch.h"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/multistage.h"
#include "conv3x3/portable/multistage_tile.cuh"

namespace jaxunet::cuda {
namespace {

// A part of x or of the projection, and its weights.
struct Section {
  const void *image, *weights;  // weights of the first tap and channel
  int width, taps;              // channels; 9 or 1
  int row_stride;               // elements from one feature's weights to the next; if flipped
};

struct Parameters {
  Section sections[2 * kMaxParts];
  int stages;          // of the ring, over all of K
  int64_t tap_stride;  // of the kernel, in elements
  int pixels, features, feature_tiles;
  FastDivmod width, height, image;  // image: pixels per image
  Channels residual;                // count = 0: none
  Rows shift;
  void* y;
};

// One bit for each row of A that a thread copies: does the pixel exist, and does each neighbour?
struct RowMasks {
  uint32_t inside = 0, up = 0, down = 0, left = 0, right = 0;

  __device__ void add(int bit, int pixel, const Parameters& p) {
    if (pixel >= p.pixels) return;
    const int line = p.width.quotient(pixel), x = p.width.remainder(pixel, line),
              y = p.height.remainder(line, p.height.quotient(line));
    const uint32_t one = 1u << bit;
    inside |= one;
    if (y > 0) up |= one;
    if (y + 1 < static_cast<int>(p.height.divisor)) down |= one;
    if (x > 0) left |= one;
    if (x + 1 < static_cast<int>(p.width.divisor)) right |= one;
  }
  __device__ uint32_t of(int dy, int dx) const {
    uint32_t mask = inside;
    if (dy) mask &= dy < 0 ? up : down;
    if (dx) mask &= dx < 0 ? left : right;
    return mask;
  }
};

// Copies the tiles of A and B, stage by stage. Pointers and strides are in bytes.
template <class M, bool kFlipped>
struct ForwardCopies {
  using CopyA = TileCopy<M::kThreads, M::kM, M::kDepth / 8>;
  using CopyB =
      TileCopy<M::kThreads, kFlipped ? M::kN : M::kDepth, (kFlipped ? M::kDepth : M::kN) / 8>;
  const Parameters& p;
  CopyA copy_a;
  CopyB copy_b;
  RowMasks masks;
  int pixel, feature;  // for this thread's first copies
  // The section's index, channels, remaining taps and row_stride.
  int section, width, taps, row_stride;
  int dy, dx, channel;  // the tap's offsets; the first channel of the stage
  uint32_t rows;        // of A that exist at this tap
  const char *a, *b;

  __device__ ForwardCopies(const Parameters& p_, int first_pixel, int first_feature)
      : p(p_),
        copy_a(threadIdx.x),
        copy_b(threadIdx.x),
        pixel(first_pixel + copy_a.row),
        feature(first_feature + (kFlipped ? copy_b.row : 8 * copy_b.vector)) {
#pragma unroll
    for (int i = 0; i < CopyA::kPasses; ++i) masks.add(i, pixel + i * CopyA::kRows, p);
    begin_section(0);
  }

  __device__ void begin_section(int index) {
    const Section& now = p.sections[index];
    section = index;
    width = now.width;
    taps = now.taps;
    row_stride = now.row_stride;
    channel = 0;
    dy = dx = taps == 1 ? 0 : -1;
    rows = masks.of(dy, dx);
    const int64_t row = pixel + dy * static_cast<int>(p.width.divisor) + dx;
    a = static_cast<const char*>(now.image) + 2 * (row * width + 8 * copy_a.vector);
    const int64_t first = kFlipped ? static_cast<int64_t>(feature) * row_stride + 8 * copy_b.vector
                                   : static_cast<int64_t>(copy_b.row) * p.features + feature;
    b = static_cast<const char*>(now.weights) + 2 * first;
  }

  __device__ void operator()(uint32_t stage) {
    // The address must be valid even if zeros are written instead of a copy.
    const Section& first = p.sections[0];
    const uint32_t there = channel + 8 * copy_a.vector < width ? rows : 0;
#pragma unroll
    for (int i = 0; i < CopyA::kPasses; ++i) {
      const bool valid = there >> i & 1;
      const char* from = a + static_cast<int64_t>(2 * i * CopyA::kRows) * width;
      cp_async_16(stage + copy_a.place(i), valid ? from : first.image, valid);
    }
    if (copy_b.active) {
      // How many rows of this stage exist, counted from the thread's first one.
      const int channels = width - channel - (kFlipped ? 8 * copy_b.vector : copy_b.row),
                features = p.features - feature;
      const int end = kFlipped ? (channels > 0 ? features : 0) : (features > 0 ? channels : 0);
#pragma unroll
      for (int i = 0; i < CopyB::kPasses; ++i) {
        const bool valid = i * CopyB::kRows < end;
        const char* from =
            b + static_cast<int64_t>(2 * i * CopyB::kRows) * (kFlipped ? row_stride : p.features);
        cp_async_16(stage + M::kLeftBytes + copy_b.place(i), valid ? from : first.weights, valid);
      }
    }
    advance();
  }

  __device__ void advance() {
    // From one channel's weights to the next.
    const int64_t channel_stride = kFlipped ? 1 : p.features;
    channel += M::kDepth;
    if (channel < width) {
      a += 2 * M::kDepth;
      b += 2 * M::kDepth * channel_stride;
    } else if (--taps > 0) {
      const bool line_ends = dx == 1;
      const int advanced = channel - M::kDepth;
      const int64_t pixels = line_ends ? static_cast<int>(p.width.divisor) - 2 : 1;
      a += 2 * (pixels * width - advanced);
      b += 2 * (p.tap_stride - advanced * channel_stride);
      channel = 0;
      dx = line_ends ? -1 : dx + 1;
      dy += line_ends;
      rows = masks.of(dy, dx);
    } else if (section + 1 < 2 * kMaxParts) {
      begin_section(section + 1);  // after the last one, an empty section that copies nothing
    }
  }
};

// The shift of eight features. A thread reloads it when it reaches the next sample.
struct ShiftVector {
  float at[8];
  int end = INT_MAX;  // the first pixel that needs another

  __device__ explicit ShiftVector(const Parameters& p) {
    if (p.shift.data) end = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = -0.0f;  // changes no sum
  }
  __device__ void load(const Parameters& p, int pixel, int feature) {
    const int sample = p.image.quotient(pixel);
    end = p.shift.stride ? (sample + 1) * static_cast<int>(p.image.divisor) : INT_MAX;
    const auto* from =
        reinterpret_cast<const float4*>(p.shift.data + sample * p.shift.stride + feature);
    *reinterpret_cast<float4*>(at) = from[0];
    *reinterpret_cast<float4*>(at + 4) = from[1];
  }
};

// Loads the residual for all vectors of this thread before it uses any, so that it waits for memory
// only once; the registers of the mainloop's fragments are free to hold it. `rows` rows exist from
// `pixel` on.
template <class Vectors, class T>
__device__ void load_residual(const Channels& residual, int pixel, int feature, int rows,
                              Eight<T> (&to)[Vectors::kCount]) {
  if (!residual.count) return;
  // The eight features lie in one part, whose rows are `stride` elements apart.
  const T* from = residual.at<T>(pixel, feature);
  const int64_t stride = residual.at<T>(pixel + 1, feature) - from;
#pragma unroll
  for (int n = 0; n < Vectors::kCount; ++n) {
    if (n * Vectors::kRows < rows) to[n].load(from + n * Vectors::kRows * stride);
  }
}

template <class M, class T>
__device__ void write_outputs(const Parameters& p, const typename M::Accumulator& accumulator,
                              int first_pixel, int first_feature) {
  using Vectors = RowVectors<M>;
  const Vectors vectors;
  const int pixel = first_pixel + vectors.row, feature = first_feature + vectors.column;
  const int rows = vectors.active && feature < p.features ? p.pixels - pixel : 0;
  Eight<T> residual[Vectors::kCount];
  load_residual<Vectors>(p.residual, pixel, feature, rows, residual);
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(pixel) * p.features + feature;
  ShiftVector shift(p);
  vectors.each(accumulator, [&](int n, float (&values)[8]) {
    const int row = n * Vectors::kRows;
    const bool there = row < rows;
    if (there && pixel + row >= shift.end) shift.load(p, pixel + row, feature);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += shift.at[i];
    if (p.residual.count) {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] += wide(residual[n].at[i]);
    }
    Eight<T> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.at[i] = narrow<T>(values[i]);
    if (there) store_16(y, out.at);
    y += static_cast<int64_t>(Vectors::kRows) * p.features;
  });
}

template <class M, class T, bool kFlipped>
__global__ void __launch_bounds__(M::kThreads, M::kBlocks)
    multistage_forward_kernel(const __grid_constant__ Parameters p) {
  const int pixel_tile = blockIdx.x / p.feature_tiles,
            feature_tile = blockIdx.x - pixel_tile * p.feature_tiles;
  const int first_pixel = pixel_tile * M::kM, first_feature = feature_tile * M::kN;
  typename M::Accumulator accumulator{};
  ForwardCopies<M, kFlipped> copies(p, first_pixel, first_feature);
  multistage_mainloop<M, T, false, !kFlipped>(accumulator, p.stages, copies);
  if (add_slices<M>(accumulator)) write_outputs<M, T>(p, accumulator, first_pixel, first_feature);
}

// Appends the parts of an image. Its weights are (taps, all channels, features), or if flipped
// (taps, features, all channels), read from the last tap to the first.
Section* append(Section* to, const Parts& parts, const void* weights, int taps, int64_t features,
                bool flipped) {
  int64_t first = flipped ? (taps - 1) * parts.total * features : 0;
  for (int i = 0; i < parts.count; ++i) {
    if (parts.channels[i] == 0) continue;  // its taps have no stages
    *to++ = {parts.data[i], static_cast<const char*>(weights) + 2 * first,
             static_cast<int>(parts.channels[i]), taps, static_cast<int>(parts.total)};
    first += flipped ? parts.channels[i] : parts.channels[i] * features;
  }
  return to;
}

Parameters parameters_of(const Conv3x3& plan, int depth) {
  Parameters p{};
  Section* end = append(p.sections, plan.x, plan.kernel, 9, plan.features, plan.flipped);
  end = append(end, plan.projected, plan.shortcut, 1, plan.features, plan.flipped);
  for (const Section* i = p.sections; i != end; ++i)
    p.stages += i->taps * ((i->width + depth - 1) / depth);
  p.tap_stride = (plan.flipped ? -1 : 1) * plan.x.total * plan.features;
  p.pixels = static_cast<int>(plan.batch * plan.height * plan.width);
  p.features = static_cast<int>(plan.features);
  p.width = FastDivmod(plan.width);
  p.height = FastDivmod(plan.height);
  p.image = FastDivmod(plan.height * plan.width);
  p.residual = channels_of(plan.residual);
  p.shift = plan.shift;
  p.y = plan.y.data[0];
  return p;
}

template <class M, class T>
cudaError_t run(const Conv3x3& plan, cudaStream_t stream) {
  Parameters p = parameters_of(plan, M::kDepth);
  p.feature_tiles = (p.features + M::kN - 1) / M::kN;
  const auto kernel =
      plan.flipped ? multistage_forward_kernel<M, T, true> : multistage_forward_kernel<M, T, false>;
  const cudaError_t error = allow_shared_memory(kernel, M::kSharedBytes);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(p.pixels / M::kM + (p.pixels % M::kM > 0)) *
                      static_cast<unsigned>(p.feature_tiles);
  return launch(kernel, blocks, M::kThreads, M::kSharedBytes, stream, p);
}

template <class T>
cudaError_t run(const Conv3x3& plan, int tile, cudaStream_t stream) {
  switch (tile) {
#define RUN(index, ...) \
  case index:           \
    return run<Multistage<__VA_ARGS__>, T>(plan, stream);
    MULTISTAGE_TILES(RUN)
#undef RUN
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t multistage_forward(const Conv3x3& plan, int tile, cudaStream_t stream) {
  if (!takes_multistage(plan)) return cudaErrorInvalidValue;
  if (plan.batch * plan.height * plan.width == 0 || plan.features == 0) return cudaSuccess;
  return plan.type == Type::kFloat16 ? run<__half>(plan, tile, stream)
                                     : run<__nv_bfloat16>(plan, tile, stream);
}

}  // namespace jaxunet::cuda
