// Sums that the weight gradient ends with: of dy over the pixels of a sample, and of partial sums in a fixed order.
// Both are bound by memory: a thread reads 16 bytes at a time and has several such reads on their way.

#include "common/dispatch_dtype.cuh"
#include "common/fast_divmod.h"
#include "conv3x3/kernels.h"
#include "common/launch.cuh"
#include "common/types.cuh"
#include "conv3x3/accumulator_tile.h"

namespace jaxunet::cuda {
namespace {

constexpr int kLogThreads = 8, kThreads = 1 << kLogThreads, kAhead = 8;  // reads on their way

// --- sums of dy ---

// A vector is as many neighbours as 16 bytes hold, or one where rows are not multiples of that.
constexpr int kLanes = 8, kPixels = kThreads / kLanes;

// Block (8 vectors of features, sample, segment).
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) channel_sums_kernel(const T* dy, int image, int features, float* sums) {
  __shared__ float rows[kPixels][kLanes * kWidth + 1];
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes, first_feature = blockIdx.x * kLanes * kWidth;
  const int segments = gridDim.z, share = (image + segments - 1) / segments, first = blockIdx.z * share;
  const int last = first + share < image ? first + share : image, feature = first_feature + lane * kWidth;
  float totals[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) totals[i] = 0;
  if (feature < features) {
    const T* from = dy + static_cast<int64_t>(blockIdx.y) * image * features + feature;
    for (int pixel = first + row; pixel < last; pixel += kAhead * kPixels) {
      Vector<T, kWidth> values[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = pixel + i * kPixels;
        values[i] = {};
        if (at < last)
          values[i] = *reinterpret_cast<const Vector<T, kWidth>*>(from + static_cast<int64_t>(at) * features);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int n = 0; n < kWidth; ++n) totals[n] += wide(values[i].at[n]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) rows[row][lane * kWidth + i] = totals[i];
  __syncthreads();
  const int mine = first_feature + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kLanes * kWidth && mine < features) {
    float total = 0;
    for (int i = 0; i < kPixels; ++i) total += rows[i][threadIdx.x];
    sums[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * features + mine] = total;
  }
}

template <class T, int kWidth>
cudaError_t run_channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums, cudaStream_t stream) {
  const int image = static_cast<int>(plan.height * plan.width), features = static_cast<int>(plan.features);
  constexpr int kFeatures = kLanes * kWidth;
  const dim3 grid((features + kFeatures - 1) / kFeatures, static_cast<unsigned>(plan.batch), segments);
  return launch(channel_sums_kernel<T, kWidth>, grid, kThreads, 0, stream, static_cast<const T*>(plan.dy), image,
                features, sums);
}

template <class T>
cudaError_t run_channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  return plan.features % kWidth ? run_channel_sums<T, 1>(plan, segments, sums, stream)
                                : run_channel_sums<T, kWidth>(plan, segments, sums, stream);
}

// --- sums in order ---

template <class T>
__device__ void put(void* to, int64_t entry, int64_t count, float4 values) {
  T* at = static_cast<T*>(to) + entry;
  const Vector<T, 4> four{narrow<T>(values.x), narrow<T>(values.y), narrow<T>(values.z), narrow<T>(values.w)};
  if (count % 4 == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(four) == 0) {
    *reinterpret_cast<Vector<T, 4>*>(at) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (entry + i < count) at[i] = four.at[i];
  }
}

// Four neighbours of which the first exists and `there` do: where rows are not whole 16 bytes, they are read one by
// one.
template <bool kVectors>
__device__ float4 four(const float* from, int there) {
  if constexpr (kVectors) return *reinterpret_cast<const float4*>(from);
  return {from[0], there > 1 ? from[1] : 0.0f, there > 2 ? from[2] : 0.0f, there > 3 ? from[3] : 0.0f};
}

__device__ void add(float4& total, const float4& more) {
  total.x += more.x;
  total.y += more.y;
  total.z += more.z;
  total.w += more.w;
}

// The sum of four neighbouring entries over every `step`-th part from `part` on. Reads follow one another without a
// branch between them, or the time to issue them would be longer than the memory needs.
template <bool kVectors>
__device__ float4 summed(const OrderedSum& job, int entry, int part, int step) {
  const int there = static_cast<int>(job.count) - entry;
  const float* from = job.from + part * job.count + entry;
  const int64_t stride = step * job.count;
  float4 total{0, 0, 0, 0}, values[kAhead];
  for (; part + (kAhead - 1) * step < job.parts; part += kAhead * step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) values[i] = four<kVectors>(from + i * stride, there);
    from += kAhead * stride;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) add(total, values[i]);
  }
  if (part < job.parts) {
#pragma unroll
    for (int i = 0; i < kAhead - 1; ++i) {
      values[i] = {0, 0, 0, 0};
      if (part + i * step < job.parts) values[i] = four<kVectors>(from + i * stride, there);
    }
#pragma unroll
    for (int i = 0; i < kAhead - 1; ++i) add(total, values[i]);
  }
  return total;
}

__device__ void put(const Result& to, int64_t entry, int64_t count, float4 values) {
  switch (to.type) {
    case Type::kFloat32:
      return put<float>(to.data, entry, count, values);
    case Type::kFloat16:
      return put<__half>(to.data, entry, count, values);
    default:
      return put<__nv_bfloat16>(to.data, entry, count, values);
  }
}

// Shared memory in floats: kTurned for each 128 threads that have fours of a tile of sums.
constexpr int kTurned = 8 * (64 + 4), kLogTileThreads = 7;
static_assert(1 << kLogTileThreads == TileOfSums::kThreads);

// Tiles of sums in their gradient.
struct Tiles {
  FastDivmod across;
  int channels = 0;

  Tiles() = default;
  explicit Tiles(const OrderedSum& job)
      : across(job.features / 64), channels(static_cast<int>(job.count / (9 * job.features))) {}
};

// Writes what the first `lanes` threads have of tiles of sums, from entry `first` of all tiles on: turned in shared
// memory, so that neighbours along the features are one thread's. Fours of 128 threads are eight channels of 64
// features; of fewer threads, of fewer features.
__device__ void put_tile(const OrderedSum& job, const Tiles& tiles, int first, int log_lanes, float4 total,
                         float* turned) {
  const int lanes = 1 << log_lanes, log_group = log_lanes < kLogTileThreads ? log_lanes : kLogTileThreads;
  const int group = 1 << log_group, thread = threadIdx.x & (group - 1);
  const int columns = group / 2, run = columns < 16 ? columns / 2 : 8;  // `run` neighbours are in one register
  const bool mine = static_cast<int>(threadIdx.x) < lanes;
  turned += (threadIdx.x >> log_group) * kTurned;
  if (mine) {
    float* to = turned + thread % 4 * 2 * (columns + 4) + thread / 32 * 16 + thread % 32 / 4;
    to[0] = total.x;
    to[columns + 4] = total.y;
    to[run] = total.z;
    to[run + columns + 4] = total.w;
  }
  __syncthreads();
  if (!mine) return;
  const int from = first + static_cast<int>(threadIdx.x & ~(group - 1)) * 4, tile = from / TileOfSums::kEntries;
  const TileOfSums begin(from - tile * TileOfSums::kEntries);
  const int row = thread >> (log_group - 3), column = (thread & (group / 8 - 1)) * 4,
            down = tiles.across.quotient(tile);
  const int across = tile - down * static_cast<int>(tiles.across.by), channel = down * 64 + begin.channel + row;
  const int feature = across * 64 + begin.feature + (run < 8 ? column * 2 : column);
  put(job.to, static_cast<int64_t>(begin.tap * tiles.channels + channel) * job.features + feature, job.count,
      *reinterpret_cast<const float4*>(turned + row * (columns + 4) + column));
}

// How a block's threads share an ordered sum: each reads four neighbouring entries of every `rows`-th part.
struct Share {
  int log_rows = 0;
  int64_t blocks;

  explicit Share(const OrderedSum& job) {
    // More rows where there are too few entries to occupy a large GPU.
    constexpr int64_t kEnough = 128 * 1024;
    const int most = job.features > 0 ? 4 : 6;  // of a tile's sums, eight features and as many channels for a block
    while (log_rows < most && 1 << log_rows < job.parts / job.apart && job.count / 4 << log_rows < kEnough) ++log_rows;
    const int64_t entries = 4 * kThreads >> log_rows;
    blocks = (job.count + entries - 1) / entries;
  }
};

constexpr int64_t kMostEntries = 1 << 30;  // numbers of 32 bits count them, and leave registers for a fifth block

// The sums of a launch, one's blocks after the other's.
struct OrderedSums {
  OrderedSum sum[kOrderedSums];
  Tiles tiles[kOrderedSums];
  int log_rows[kOrderedSums];
  int first[kOrderedSums];  // blocks
};

__global__ void __launch_bounds__(kThreads) ordered_sums_kernel(const __grid_constant__ OrderedSums sums) {
  constexpr int kFloats = kThreads / TileOfSums::kThreads * kTurned;
  __shared__ float4 totals[(kFloats > 4 * kThreads ? kFloats : 4 * kThreads) / 4];
  int which = 0;  // a sum without blocks begins where the next one does
#pragma unroll
  for (int i = 1; i < kOrderedSums; ++i) which += static_cast<int>(blockIdx.x) >= sums.first[i];
  const OrderedSum& job = sums.sum[which];
  const int log_rows = sums.log_rows[which], log_lanes = kLogThreads - log_rows;
  const int block = static_cast<int>(blockIdx.x) - sums.first[which];
  const int rows = 1 << log_rows, lanes = 1 << log_lanes, lane = threadIdx.x & (lanes - 1);
  const int row = threadIdx.x >> log_lanes;
  const int entry = (block * lanes + lane) * 4;
  float4 total{0, 0, 0, 0};
  if (entry < job.count) {
    const bool vectors = job.count % 4 == 0 && reinterpret_cast<uintptr_t>(job.from) % 16 == 0;
    const int part = row * job.apart, step = rows * job.apart;
    total = vectors ? summed<true>(job, entry, part, step) : summed<false>(job, entry, part, step);
  }
  if (rows > 1) {
    totals[threadIdx.x] = total;
    __syncthreads();
    if (row == 0) {
#pragma unroll 4
      for (int i = 1; i < rows; ++i) add(total, totals[i * lanes + lane]);
    }
  }
  if (job.features > 0) {
    __syncthreads();
    put_tile(job, sums.tiles[which], block * lanes * 4, log_lanes, total, reinterpret_cast<float*>(totals));
  } else if (row == 0 && entry < job.count) {
    put(job.to, entry, job.count, total);
  }
}

}  // namespace

cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums, cudaStream_t stream) {
  return dispatch_dtype(plan.type,
                 [&](auto nought) { return run_channel_sums<decltype(nought)>(plan, segments, sums, stream); });
}

cudaError_t ordered_sums(const OrderedSum (&sums)[kOrderedSums], cudaStream_t stream) {
  OrderedSums all{};
  int blocks = 0;
  for (int i = 0; i < kOrderedSums; ++i) {
    if (sums[i].count > kMostEntries) return cudaErrorInvalidValue;
    const Share share(sums[i]);
    all.sum[i] = sums[i];
    if (sums[i].features > 0) all.tiles[i] = Tiles(sums[i]);
    all.log_rows[i] = share.log_rows;
    all.first[i] = blocks;
    blocks += static_cast<int>(share.blocks);
  }
  if (blocks == 0) return cudaSuccess;
  return launch(ordered_sums_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, all);
}

}  // namespace jaxunet::cuda
