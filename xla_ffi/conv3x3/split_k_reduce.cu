// The two reductions of a weight gradient. Both add in a fixed order and are limited by memory
// bandwidth, so a thread keeps several reads of 16 bytes in flight.
//
// channel_sums: sums of dy over pixels. A block has a share of a sample's pixels and 8 vectors of
// features. Eight lanes read a pixel's vectors, so 32 pixels are read at a time. The sums of these
// 32 go through shared memory, where one thread per feature adds them.
//
// split_k_reduce: several sums of partial results, each with blocks of its own. A block's
// threads are rows × lanes, powers of two. A lane has four adjacent entries; row r adds them over
// parts r, r + rows, r + 2 rows, ..., then row 0 adds the rows through shared memory. Results from
// accumulator tiles are also transposed in shared memory before they are written. __syncthreads:
// after the rows' sums have been written, after they have been read, and after the transposed
// entries have been written.

#include <algorithm>
#include <memory>
#include <vector>

#include "common/block_ranges.h"
#include "common/dispatch_dtype.cuh"
#include "common/fast_divmod.h"
#include "common/launch.cuh"
#include "common/types.cuh"
#include "conv3x3/accumulator_tile.h"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace {

constexpr int kLogThreads = 8, kThreads = 1 << kLogThreads;
constexpr int kAhead = 8;  // reads in flight

// --- sums of dy ---

constexpr int kLanes = 8, kPixels = kThreads / kLanes;  // kPixels: read at a time by a block

// kWidth: numbers per vector. Grid: (groups of 8 vectors of features, samples, segments). `image`:
// pixels per sample.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    channel_sums_kernel(const T* dy, int image, int features, float* sums) {
  __shared__ float rows[kPixels][kLanes * kWidth + 1];  // padded against bank conflicts
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes,
            first_feature = blockIdx.x * kLanes * kWidth;
  const int segments = gridDim.z, share = (image + segments - 1) / segments,
            first = blockIdx.z * share;
  const int last = first + share < image ? first + share : image,
            feature = first_feature + lane * kWidth;
  float totals[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) totals[i] = 0;
  if (feature < features) {
    const T* from = dy + static_cast<int64_t>(blockIdx.y) * image * features + feature;
    for (int pixel = first + row; pixel < last; pixel += kAhead * kPixels) {
      AlignedArray<T, kWidth> values[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = pixel + i * kPixels;
        values[i] = {};
        if (at < last)
          values[i] = *reinterpret_cast<const AlignedArray<T, kWidth>*>(
              from + static_cast<int64_t>(at) * features);
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
cudaError_t run_channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums,
                             cudaStream_t stream) {
  const int image = static_cast<int>(plan.height * plan.width),
            features = static_cast<int>(plan.features);
  constexpr int kFeatures = kLanes * kWidth;
  // More samples than a grid can have in y take several launches, with one segment per sample.
  constexpr int64_t kMaxSamples = 65535;
  if (plan.batch > kMaxSamples && segments > 1) return cudaErrorInvalidValue;
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < plan.batch && error == cudaSuccess; first += kMaxSamples) {
    const dim3 grid((features + kFeatures - 1) / kFeatures,
                    static_cast<unsigned>(std::min(plan.batch - first, kMaxSamples)), segments);
    error = launch(channel_sums_kernel<T, kWidth>, grid, kThreads, 0, stream,
                   static_cast<const T*>(plan.dy) + first * image * features, image, features,
                   sums + first * features);
  }
  return error;
}

// Uses vectors of 16 bytes, or of one number if a pixel's features are not a multiple of 16 bytes.
template <class T>
cudaError_t run_channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums,
                             cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  return plan.features % kWidth ? run_channel_sums<T, 1>(plan, segments, sums, stream)
                                : run_channel_sums<T, kWidth>(plan, segments, sums, stream);
}

// --- partial results of splits ---

// Writes four adjacent entries of a result, as far as they exist, narrowed to its type.
template <class T>
__device__ void put(void* to, int64_t entry, int64_t count, float4 values) {
  T* at = static_cast<T*>(to) + entry;
  const AlignedArray<T, 4> four{narrow<T>(values.x), narrow<T>(values.y), narrow<T>(values.z),
                                narrow<T>(values.w)};
  if (count % 4 == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(four) == 0) {
    *reinterpret_cast<AlignedArray<T, 4>*>(at) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (entry + i < count) at[i] = four.at[i];
  }
}

// Returns four adjacent numbers, of which only the first `there`, at least one, exist. Without
// kVectors they are read one by one.
template <bool kVectors>
__device__ float4 four(const float* from, int there) {
  if constexpr (kVectors) return *reinterpret_cast<const float4*>(from);
  return {from[0], there > 1 ? from[1] : 0.0f, there > 2 ? from[2] : 0.0f,
          there > 3 ? from[3] : 0.0f};
}

__device__ void add(float4& total, const float4& more) {
  total.x += more.x;
  total.y += more.y;
  total.z += more.z;
  total.w += more.w;
}

// Sums four adjacent entries over parts `part`, `part` + `step`, ... There are no branches between
// the reads; otherwise issuing them would take longer than the memory accesses.
template <bool kVectors>
__device__ float4 summed(const SplitKReduction& job, int entry, int part, int step) {
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

// Floats of shared memory for every 128 threads that hold fours of an accumulator tile: eight
// channels × 64 features, padded.
constexpr int kTransposedFloats = 8 * (64 + 4), kLogTileThreads = 7;
static_assert(1 << kLogTileThreads == AccumulatorTile::kThreads, "its logarithm");

// The accumulator tiles of a gradient (accumulator_tile.h), in rows of tiles along the features.
struct Tiles {
  FastDivmod across;  // tiles per row
  int channels = 0;

  Tiles() = default;
  explicit Tiles(const SplitKReduction& job)
      : across(job.features / 64), channels(static_cast<int>(job.count / (9 * job.features))) {}
};

// Writes the entries of accumulator tiles that the first 2^log_lanes threads hold, from entry
// `first` of all tiles on. They are transposed in shared memory, so that a thread writes adjacent
// features. The fours of 128 threads are eight channels × 64 features; fewer threads have fewer
// features.
__device__ void put_tile(const SplitKReduction& job, const Tiles& tiles, int first, int log_lanes,
                         float4 total, float* transposed) {
  // Threads that transpose together: at most 128, as many as a consumer has.
  const int lanes = 1 << log_lanes,
            log_group = log_lanes < kLogTileThreads ? log_lanes : kLogTileThreads;
  const int group = 1 << log_group, thread = threadIdx.x & (group - 1);
  const int columns = group / 2;  // features of the group
  // Number of adjacent features in the lanes' first registers. The features of the third registers,
  // eight further on, are stored behind them.
  const int run = columns < 16 ? columns / 2 : 8;
  const bool mine = static_cast<int>(threadIdx.x) < lanes;
  transposed += (threadIdx.x >> log_group) * kTransposedFloats;
  if (mine) {
    float* to = transposed + thread % 4 * 2 * (columns + 4) + thread / 32 * 16 + thread % 32 / 4;
    to[0] = total.x;
    to[columns + 4] = total.y;
    to[run] = total.z;
    to[run + columns + 4] = total.w;
  }
  __syncthreads();
  if (!mine) return;
  const int from = first + static_cast<int>(threadIdx.x & ~(group - 1)) * 4,
            tile = from / AccumulatorTile::kEntries;
  const AccumulatorTile begin(from - tile * AccumulatorTile::kEntries);
  const int row = thread >> (log_group - 3), column = (thread & (group / 8 - 1)) * 4,
            down = tiles.across.quotient(tile);
  const int across = tile - down * static_cast<int>(tiles.across.divisor),
            channel = down * 64 + begin.channel + row;
  const int feature = across * 64 + begin.feature + (run < 8 ? column * 2 : column);
  put(job.to, static_cast<int64_t>(begin.tap * tiles.channels + channel) * job.features + feature,
      job.count, *reinterpret_cast<const float4*>(transposed + row * (columns + 4) + column));
}

// How a reduction is divided among blocks, and among a block's threads.
struct Layout {
  int log_rows = 0;
  int64_t blocks;

  explicit Layout(const SplitKReduction& job) {
    // Use more rows if there are too few entries to occupy a large GPU. To refit: time
    // split_k_reduce for gradients of different sizes with this number halved and doubled.
    constexpr int64_t kEnough = 128 * 1024;  // threads
    // With accumulator tiles, a block has at least eight features × eight channels.
    const int most = job.features > 0 ? 4 : 6;
    while (log_rows < most && 1 << log_rows < job.parts / job.part_stride &&
           job.count / 4 << log_rows < kEnough)
      ++log_rows;
    const int64_t entries = 4 * kThreads >> log_rows;
    blocks = (job.count + entries - 1) / entries;
  }
};

// 32-bit indices save registers, so that a fifth block fits on a multiprocessor.
constexpr int64_t kMaxEntries = 1 << 30;

// A reduction as the kernel reads it.
struct Job {
  SplitKReduction sum;
  Tiles tiles;
  int log_rows;
};

// All reductions of a launch. kSome suffice for one weight gradient.
constexpr int kSome = 8, kMany = 256;
template <int kMost>
struct Reductions {
  Job jobs[kMost];
  BlockRanges<kMost> ranges;
};

template <int kMost>
__global__ void __launch_bounds__(kThreads)
    split_k_reduce_kernel(const __grid_constant__ Reductions<kMost> all) {
  constexpr int kFloats = kThreads / AccumulatorTile::kThreads * kTransposedFloats;
  __shared__ float4 totals[(kFloats > 4 * kThreads ? kFloats : 4 * kThreads) / 4];
  const int index = static_cast<int>(blockIdx.x), which = all.ranges.job_of(index);
  const SplitKReduction& job = all.jobs[which].sum;
  const int log_rows = all.jobs[which].log_rows, log_lanes = kLogThreads - log_rows;
  const int block = index - all.ranges.first[which];
  const int rows = 1 << log_rows, lanes = 1 << log_lanes, lane = threadIdx.x & (lanes - 1);
  const int row = threadIdx.x >> log_lanes;
  const int entry = (block * lanes + lane) * 4;  // the first of four
  float4 total{0, 0, 0, 0};
  if (entry < job.count) {
    const bool vectors = job.count % 4 == 0 && reinterpret_cast<uintptr_t>(job.from) % 16 == 0;
    const int part = row * job.part_stride, step = rows * job.part_stride;
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
    put_tile(job, all.jobs[which].tiles, block * lanes * 4, log_lanes, total,
             reinterpret_cast<float*>(totals));
  } else if (row == 0 && entry < job.count) {
    put(job.to, entry, job.count, total);
  }
}

// Launches as many reductions, from `begin` on, as have room in one launch, and moves `begin` past
// them.
template <int kMost>
cudaError_t run_some(const std::vector<SplitKReduction>& reductions, size_t& begin,
                     cudaStream_t stream) {
  const auto all = std::make_unique<Reductions<kMost>>();
  for (; begin < reductions.size() && !all->ranges.full(); ++begin) {
    const SplitKReduction& sum = reductions[begin];
    if (sum.count == 0) continue;
    if (sum.count > kMaxEntries) return cudaErrorInvalidValue;
    const Layout layout(sum);
    all->jobs[all->ranges.jobs] = {sum, sum.features > 0 ? Tiles(sum) : Tiles(), layout.log_rows};
    all->ranges.add(layout.blocks);
  }
  const unsigned blocks = static_cast<unsigned>(all->ranges.blocks);
  return blocks ? launch(split_k_reduce_kernel<kMost>, dim3(blocks), kThreads, 0, stream, *all)
                : cudaSuccess;
}

}  // namespace

cudaError_t channel_sums(const Conv3x3WeightGradient& plan, int segments, float* sums,
                         cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto zero) {
    return run_channel_sums<decltype(zero)>(plan, segments, sums, stream);
  });
}

cudaError_t split_k_reduce(const std::vector<SplitKReduction>& reductions, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t begin = 0; begin < reductions.size() && error == cudaSuccess;) {
    error = reductions.size() <= kSome ? run_some<kSome>(reductions, begin, stream)
                                       : run_some<kMany>(reductions, begin, stream);
  }
  return error;
}

}  // namespace jaxunet::cuda
