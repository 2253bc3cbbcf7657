// One block's tile of the product of two 16-bit matrices: mma.sync reads a ring of stages in shared
// memory that cp.async fills. Compute capability 8.0 and later.
//
// Each stage holds a tile of the left and a tile of the right matrix, kDepth steps of K. A warp
// computes kWarpM × kWarpN outputs. With slices, the warps of each slice compute the whole tile
// from their own share of each stage's K, and the slices are added at the end in a fixed order. The
// additional warps hide latency if a multiprocessor has only one block.
//
// Synchronization: one __syncthreads per stage. Before it, every thread has waited for its own
// copies to the next stage and has read its last fragments of this stage. So after it, the next
// stage may be read and this one refilled.
#pragma once

#include "common/launch.cuh"
#include "common/types.cuh"
#include "common/warp_instructions.cuh"

namespace jaxunet::cuda {

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }

template <int kM_, int kN_, int kDepth_, int kWarpM_, int kWarpN_, int kSlices_, int kStages_,
          int kBlocks_>
struct Multistage {
  static constexpr int kM = kM_, kN = kN_, kDepth = kDepth_, kWarpM = kWarpM_, kWarpN = kWarpN_,
                       kSlices = kSlices_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;  // per multiprocessor; bounds the registers
  static constexpr int kWarps = kM / kWarpM * (kN / kWarpN), kThreads = 32 * kWarps * kSlices;
  static constexpr int kSteps = kDepth / 16 / kSlices;  // of 16, per warp and stage
  static constexpr int kLeftBytes = kM * kDepth * 2, kStageBytes = kLeftBytes + kN * kDepth * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kI = kWarpM / 16, kJ = kWarpN / 8;  // fragments of a warp's outputs
  static_assert(kSteps > 0 && kSteps % 2 == 0, "two buffers of fragments alternate");
  static_assert(kWarpN % 16 == 0 && kSharedBytes <= 99 * 1024,
                "a block of compute capability 8.6 or 8.9 has 99 KiB");
  static_assert((kSlices - 1) * kM * kN * 4 <= kSharedBytes, "the slices are added there");

  using Accumulator = float[kI][kJ][4];
};

// The layout of a tile in shared memory: rows of kVectors vectors of 16 bytes. A vector's position
// in its row is swizzled, so that the eight rows of a matrix that ldmatrix reads lie in different
// banks: kVectors is a multiple of 8, or an odd multiple of 4, where two rows span all banks.
template <int kVectors>
struct SwizzledRows {
  static_assert(kVectors % 4 == 0);
  static constexpr int kBytes = 16 * kVectors;  // per row
  static __device__ int swizzle(int row) { return kVectors % 8 ? row / 2 % 4 : row % 8; }
  static __device__ uint32_t offset(int row, int vector) {
    return row * kBytes + 16 * (vector ^ swizzle(row));
  }
};

// How the threads of a block fill a tile: each copies one vector from each of kPasses rows, kRows
// apart.
template <int kThreads, int kTileRows, int kVectors>
struct TileCopy {
  static constexpr int kRows = floor_power_of_two(kThreads / kVectors), kPasses = kTileRows / kRows;
  using Layout = SwizzledRows<kVectors>;
  static_assert(kTileRows % kRows == 0 && (kRows % 8 == 0 || kVectors % 8 == 0));
  int row, vector;
  bool active;  // false: the thread copies nothing
  uint32_t offset;

  __device__ explicit TileCopy(int thread)
      : row(thread / kVectors),
        vector(thread % kVectors),
        active(row < kRows),
        offset(Layout::offset(row, vector)) {}
  // Where a pass's vector goes in the tile. `row` is less than kRows, a power of two, so it shares
  // no bit with pass · kRows, and the two can be swizzled separately.
  __device__ uint32_t place(int pass) const {
    return (offset ^ 16 * Layout::swizzle(pass * kRows)) + pass * kRows * Layout::kBytes;
  }
};

// Reads a warp's kCount fragments of a tile. Each has 16 rows of the product (kLeft) or 16 columns.
// A row of the tile in shared memory is a step of K (kMnMajor), or otherwise one of these rows or
// columns.
template <bool kLeft, bool kMnMajor, int kTileMn, int kDepth, int kSteps, int kCount>
struct FragmentReader {
  using Layout = SwizzledRows<(kMnMajor ? kTileMn : kDepth) / 8>;
  uint32_t offsets[kMnMajor ? kCount : kSteps];

  // `mn`: the warp's first row or column. `k`: its first step of K in a stage.
  __device__ FragmentReader(int mn, int k) {
    // ldmatrix reads four 8 × 8 matrices; this lane gives the address of one row of one of them.
    const int lane = threadIdx.x % 32, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
    mn += 8 * (kLeft ? low : high);
    k += 8 * (kLeft ? high : low);
#pragma unroll
    for (int i = 0; i < (kMnMajor ? kCount : kSteps); ++i) {
      offsets[i] = kMnMajor ? Layout::offset(k + row, mn / 8 + 2 * i)
                            : Layout::offset(mn + row, k / 8 + 2 * i);
    }
  }

  __device__ void read(uint32_t (&to)[kCount][4], uint32_t tile, int step) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ldmatrix_x4<kMnMajor>(
          to[i], tile + offsets[kMnMajor ? i : step] + 16 * Layout::kBytes * (kMnMajor ? step : i));
    }
  }
};

// The place of this thread's warp in the tile.
template <class M>
struct WarpPlace {
  int slice, row, column;
  __device__ WarpPlace() {
    const int warp = threadIdx.x / 32, inside = warp % M::kWarps;
    slice = warp / M::kWarps;
    row = inside / (M::kN / M::kWarpN) * M::kWarpM;
    column = inside % (M::kN / M::kWarpN) * M::kWarpN;
  }
};

template <class M, class T>
__device__ void multiply(typename M::Accumulator& accumulator, const uint32_t (&left)[M::kI][4],
                         const uint32_t (&right)[M::kJ / 2][4]) {
#pragma unroll
  for (int i = 0; i < M::kI; ++i) {
#pragma unroll
    for (int n = 0; n < M::kJ; ++n) {
      const int j = i % 2 ? M::kJ - 1 - n : n;  // zigzag: shares a fragment
      mma_m16n8k16(accumulator[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1],
                   T());
    }
  }
}

// Accumulates the products of `stages` stages. `copy(address)` issues the copies of the next stage
// to `address`: the left tile, followed by the right tile.
template <class M, class T, bool kLeftMnMajor, bool kRightMnMajor, class Copy>
__device__ void multistage_mainloop(typename M::Accumulator& accumulator, int stages, Copy& copy) {
  const WarpPlace<M> warp;
  const int first = warp.slice * M::kSteps * 16;
  const FragmentReader<true, kLeftMnMajor, M::kM, M::kDepth, M::kSteps, M::kI> left(warp.row,
                                                                                    first);
  const FragmentReader<false, kRightMnMajor, M::kN, M::kDepth, M::kSteps, M::kJ / 2> right(
      warp.column, first);
  const uint32_t ring = shared_address(shared_memory()), end = ring + M::kSharedBytes;
  const auto next = [&](uint32_t stage) {
    return stage + M::kStageBytes == end ? ring : stage + M::kStageBytes;
  };
  uint32_t a[2][M::kI][4], b[2][M::kJ / 2][4], filling = ring, reading = ring;
  const auto fill = [&](bool more) {
    if (more) copy(filling);
    cp_async_commit();  // empty at the end, so that groups and stages have the same count
    filling = next(filling);
  };
#pragma unroll
  for (int i = 0; i < M::kStages - 1; ++i) fill(i < stages);
  cp_async_wait<M::kStages - 2>();
  __syncthreads();
  left.read(a[0], reading, 0);
  right.read(b[0], reading + M::kLeftBytes, 0);

  for (int stage = 0; stage < stages; ++stage) {
#pragma unroll
    for (int step = 0; step < M::kSteps; ++step) {
      if (step == 0) fill(stage + M::kStages - 1 < stages);
      if (step == M::kSteps - 1) {
        cp_async_wait<M::kStages - 2>();
        __syncthreads();
        reading = next(reading);
      }
      // Reads the next step's fragments while the tensor cores multiply this step's. After the last
      // step this reads a stage that was not filled, but those fragments are never used.
      left.read(a[(step + 1) % 2], reading, (step + 1) % M::kSteps);
      right.read(b[(step + 1) % 2], reading + M::kLeftBytes, (step + 1) % M::kSteps);
      multiply<M, T>(accumulator, a[step % 2], b[step % 2]);
    }
  }
}

// Adds the slices' accumulators to those of the first slice, in order. Returns true in the first
// slice.
template <class M>
__device__ bool add_slices(typename M::Accumulator& accumulator) {
  if constexpr (M::kSlices == 1) return true;
  const WarpPlace<M> warp;
  float* sums = reinterpret_cast<float*>(shared_memory()) + threadIdx.x % (32 * M::kWarps);
  constexpr int kStride = 32 * M::kWarps;  // from one number of a thread to the next
  __syncthreads();  // no warp reads the ring any more, and no copy is in flight
#pragma unroll
  for (int n = 0; n < M::kI * M::kJ * 4; ++n) {
    if (warp.slice > 0)
      sums[((warp.slice - 1) * M::kI * M::kJ * 4 + n) * kStride] =
          accumulator[n / 4 / M::kJ][n / 4 % M::kJ][n % 4];
  }
  __syncthreads();
  if (warp.slice > 0) return false;
#pragma unroll
  for (int slice = 0; slice < M::kSlices - 1; ++slice) {
#pragma unroll
    for (int n = 0; n < M::kI * M::kJ * 4; ++n)
      accumulator[n / 4 / M::kJ][n / 4 % M::kJ][n % 4] +=
          sums[(slice * M::kI * M::kJ * 4 + n) * kStride];
  }
  return true;
}

// Calls begin(row) for each row of the tile in which this lane has outputs and, if that returns
// true, visit(column, value, value of the next column) for each pair of them.
template <class M, class Begin, class Visit>
__device__ void each_row(const typename M::Accumulator& accumulator, Begin begin, Visit visit) {
  const WarpPlace<M> warp;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2 * M::kI; ++n) {
    if (!begin(warp.row + 8 * n + lane / 4)) continue;
#pragma unroll
    for (int j = 0; j < M::kJ; ++j) {
      visit(warp.column + 8 * j + lane % 4 * 2, accumulator[n / 2][j][n % 2 * 2],
            accumulator[n / 2][j][n % 2 * 2 + 1]);
    }
  }
}

// Rearranges the outputs of a warp into rows. In an accumulator, a lane holds pairs of columns;
// here it gets vectors of eight columns, 16 bytes in a 16-bit type, and the lanes beside it get the
// rest of the row. The outputs go through shared memory in pieces of 16 rows. Each warp has its own
// buffer for two pieces, which it uses in turn, so that it need not wait for other warps.
//
// To avoid bank conflicts, rows are padded by eight numbers, and the halves of a vector are
// exchanged if bit 2 of row · kLanes + vector is set. Then the eight lanes that read 16 bytes each
// at once use different banks, and so do the sixteen that write 8 bytes each.
template <class M>
struct RowVectors {
  static constexpr int kLanes = M::kWarpN > 32 ? 8 : 4;  // per row; with 48 columns, two are idle
  static constexpr int kRows = 32 / kLanes;              // rows that a warp reads at once
  static constexpr int kPasses = 16 / kRows;             // read passes per piece
  static constexpr int kCount = M::kI * kPasses;         // vectors per lane
  static constexpr int kRowBytes = 4 * (M::kWarpN + 8), kPieceBytes = 16 * kRowBytes;
  // With slices, other warps may still be reading the sums that add_slices put there.
  static constexpr int kFirstByte = (M::kSlices - 1) * M::kM * M::kN * 4;
  static_assert(M::kWarpN >= 32 && M::kWarpN <= 8 * kLanes && kRowBytes % 32 == 0);
  static_assert(kFirstByte + 2 * M::kWarps * kPieceBytes <= M::kSharedBytes);

  int row, column;  // of the lane's first vector in the tile; the next are kRows rows apart
  bool active;      // false: the lane has no vectors
  uint32_t pieces, from;

  __device__ RowVectors() {
    const WarpPlace<M> warp;
    const int lane = threadIdx.x % 32, vector = lane % kLanes;
    row = warp.row + lane / kLanes;
    column = warp.column + 8 * vector;
    active = 8 * vector < M::kWarpN;
    pieces = shared_address(shared_memory()) + kFirstByte +
             threadIdx.x / 32 % M::kWarps * 2 * kPieceBytes;
    from = pieces + lane / kLanes * kRowBytes + 32 * (active ? vector : vector % 4) +
           16 * (lane / 4 % 2);
  }

  // Calls visit(n, values) for n from 0 to kCount - 1; in lanes that are not active, the values are
  // meaningless. Only warps for which add_slices returned true call this.
  template <class Visit>
  __device__ void each(const typename M::Accumulator& accumulator, Visit visit) const {
    // Waits until no warp reads the ring any more. With slices, add_slices has already waited.
    if constexpr (M::kSlices == 1) __syncthreads();
#pragma unroll
    for (int i = 0; i < M::kI; ++i) {
      const uint32_t piece = i % 2 * kPieceBytes;
      write(accumulator[i], pieces + piece);
      // Also orders the reads of the previous piece before the writes of the next one, which use
      // the same buffer.
      __syncwarp();
      float values[kPasses][8];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const uint32_t at = from + piece + pass * kRows * kRowBytes;
        load_shared(values[pass], at);
        load_shared(values[pass] + 4, at ^ 16);
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) visit(i * kPasses + pass, values[pass]);
    }
  }

  static __device__ void write(const float (&fragments)[M::kJ][4], uint32_t piece) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = 8 * n + lane / 4;
#pragma unroll
      for (int j = 0; j < M::kJ; ++j) {
        const int exchanged = (row * kLanes + j) / 4 % 2;
        store_shared(piece + row * kRowBytes + 32 * j + (lane % 4 * 8 ^ 16 * exchanged),
                     fragments[j][2 * n], fragments[j][2 * n + 1]);
      }
    }
  }
};

}  // namespace jaxunet::cuda
