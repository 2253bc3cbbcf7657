// GroupNorm backward in one launch, all gradients but those of scale and offset:
//   n = (x - mean) * inverse,   z = scale * n + offset,   dz = dy * act'(z),
//   sums = (sum of dz, sum of dz * n) over the pixels, for each channel,
//   dx = inverse * (scale * dz - (S0 + n * S1) / N) + added,
// where S0 and S1 are the sums over the group of scale * dz and of scale * dz * n, and N its
// elements. parameter_gradients.cu adds `sums` over the batch. Large images take
// backward_streaming.cu instead (dispatch.cu).
//
// A block owns some channels of a sample, whole groups, and all pixels or a cluster's share of them
// (backward_tiling.h).
// - Prologue: start to copy x and dy to shared memory in kBackwardStages chunks; prefetch the added
//   tensors to L2; the channels' coefficients by way of shared memory to registers.
// - Mainloop: chunk by chunk, sums of dz and dz * value of the thread's channels (value: x, or for
//   float32 x - mean); write act(z) where it is wanted. With `keep`, dz replaces dy in shared
//   memory as float32, so that the epilogue computes no sigmoid; else a later chunk is copied into
//   the stage that became free.
// - Reduction: rows of the block (partial sums in shared memory, added by teams of lanes, first dz,
//   then dz * value), cluster (distributed shared
//   memory), group.
// - Epilogue: from the last chunk backwards, dx. Chunks that left shared memory are copied again.
//
// In 16 bits, with silu, z is kept as -log2(e) * z, the argument of ex2, and a dz that is computed
// again as -ln(2) * dz: both factors cancel in factor * dz.
//
// Shared memory: stage_bytes of staged chunks (Staged), then BackwardScratch.
//
// Synchronisation: staged copies need none beyond cp_async_wait; __syncthreads separates the
// coefficients' way through shared memory and the levels of the reduction. A cluster arrives when
// its sums are written and waits before it reads those of its peers; it arrives again when it has
// read them and waits at the end, so that no block leaves while others read its shared memory.
#include "backward_smem_resident.cuh"
#include "common/dispatch_dtype.cuh"

namespace jaxunet::cuda {
namespace {

// Registers of a thread: three blocks of 256 threads share a multiprocessor, or two of 384.
constexpr int kRegisters = 80;

constexpr float kLn2 = 0.693147181f, kLog2e = 1.44269504f;

// The factor by which z, and ChannelAffine's coefficients, are kept.
template <class T>
__device__ float scale_of_z(bool silu) {
  return sizeof(T) == 2 && silu ? -kLog2e : 1.0f;
}

// dy to dz, and act(z). kFirst: dz unscaled; otherwise dz / scale_of_z, and no act(z).
template <class T, int V, bool kFirst>
__device__ void differentiate(const ChannelAffine<T, V>& norm, bool silu, const float (&value)[V],
                              float (&given)[V], float (&active)[V]) {
  if (silu) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = norm.at(value, j);
      if constexpr (sizeof(T) == 4) {
        given[j] = activation_gradient<T>(given[j], z, true, &active[j]);
      } else {
        const float s = reciprocal(1.0f + power_of_two(z));
        if constexpr (kFirst) {
          active[j] = z * s * -kLn2;
          given[j] *= active[j] * (1.0f - s) + s;
        } else {
          given[j] = given[j] * s * (z * (kLn2 * kLn2 - kLn2 * kLn2 * s) - kLn2);
        }
      }
    }
  } else if constexpr (kFirst) {
#pragma unroll
    for (int j = 0; j < V; ++j) active[j] = norm.at(value, j);
  }
}

// The rows of one channel of the sample.
struct ChannelRows {
  float scale, offset, mean, inverse;
  __device__ ChannelRows(const GradientOperands& of, int sample, int channel)
      : scale(*channel_entry(of.scale, sample, channel)),
        offset(*channel_entry(of.offset, sample, channel)),
        mean(*channel_entry(of.mean, sample, channel)),
        inverse(*channel_entry(of.inverse, sample, channel)) {}
};

template <class T>
__device__ void put_coefficients(const BackwardScratch& scratch, int c, const ChannelRows& rows,
                                 bool silu) {
  const float factor = rows.scale * rows.inverse;
  const float shift = kUsesPivot<T> ? rows.offset : rows.offset - rows.mean * factor;
  scratch.factor[c] = factor * scale_of_z<T>(silu);
  scratch.shift[c] = shift * scale_of_z<T>(silu);
  scratch.mean[c] = rows.mean;
  scratch.inverse[c] = rows.inverse;
}

// A channel's sums over all pixels, to g.of.sums and scratch.products.
template <class T>
__device__ void finish_channel(const Backward& g, const BackwardScratch& scratch, int c,
                               float constant, float slope) {
  if constexpr (!kUsesPivot<T>) slope -= scratch.mean[c] * constant;
  slope *= scratch.inverse[c];
  if (blockIdx.x == 0) {
    const int own = g.tiling.channels / g.tiling.channel_blocks;
    float* const to = g.of.sums + 2 * static_cast<int64_t>(blockIdx.z) * g.tiling.channels +
                      static_cast<int64_t>(blockIdx.y) * own + c;
    to[0] = constant;
    to[g.tiling.channels] = slope;
  }
  scratch.products[0][c] = scratch.factor[c] * constant;
  scratch.products[1][c] = scratch.factor[c] * slope;
}

// The sum of channel c's rows of partial sums, to every lane of its team.
__device__ inline float sum_rows(const BackwardTiling& tiling, const BackwardScratch& scratch,
                                 int c, bool there) {
  const int team = 1 << tiling.team_bits, member = static_cast<int>(threadIdx.x) & (team - 1);
  float sum = 0;
  if (there) {
#pragma unroll 8
    for (int r = member; r < tiling.rows; r += team) sum += scratch.partial[r * scratch.stride + c];
  }
#pragma unroll 1
  for (int step = team / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Sums of a thread's channels over its pixels, to finish_channel's results; the caller synchronises
// the block afterwards, and with several ranks calls cluster_wait before the block ends.
template <class T, int V>
__device__ void reduce(const Backward& g, const BackwardScratch& scratch, const StreamingTile& tile,
                       const float (&constant)[V], const float (&slope)[V]) {
  const BackwardTiling& tiling = g.tiling;
  const int own = tiling.vectors * V, threads = static_cast<int>(blockDim.x);
  const int teams = threads >> tiling.team_bits;
  const int first = static_cast<int>(threadIdx.x) >> tiling.team_bits;
  const bool leads = (static_cast<int>(threadIdx.x) & ((1 << tiling.team_bits) - 1)) == 0;
  float* const mine = scratch.partial + tile.row * scratch.stride + tile.local;
  if (tile.row < tiling.rows) store_floats(mine, constant);
  __syncthreads();
  // All lanes go round as often, as the shuffles need them all.
#pragma unroll 1
  for (int base = 0; base < own; base += teams) {
    const int c = base + first;
    const float sum = sum_rows(tiling, scratch, c, c < own);
    if (leads && c < own) scratch.totals[c].x = sum;
  }
  __syncthreads();
  if (tile.row < tiling.rows) store_floats(mine, slope);
  __syncthreads();
#pragma unroll 1
  for (int base = 0; base < own; base += teams) {
    const int c = base + first;
    const float sum = sum_rows(tiling, scratch, c, c < own);
    if (!leads || c >= own) continue;
    if (tiling.ranks > 1) {
      scratch.totals[c].y = sum;
    } else {
      finish_channel<T>(g, scratch, c, scratch.totals[c].x, sum);  // this thread wrote x
    }
  }
  if (tiling.ranks == 1) return;
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += threads) {
    float4 total{};
#pragma unroll 4
    for (int rank = 0; rank < tiling.ranks; ++rank) {
      const float4 part = read_peer(scratch.totals + c, rank);
      total.x += part.x;
      total.y += part.y;
    }
    finish_channel<T>(g, scratch, c, total.x, total.y);
  }
  cluster_arrive();  // this thread has read its peers; the wait is at the end
}

// The groups' terms of dx, for each channel.
template <class T>
__device__ void finish_groups(const Backward& g, const BackwardScratch& scratch, int own) {
  const BackwardTiling& tiling = g.tiling;
  const float share = 1.0f / (scale_of_z<T>(g.of.silu) * static_cast<float>(tiling.group) *
                              static_cast<float>(tiling.pixels));
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += static_cast<int>(blockDim.x)) {
    const int group = c / tiling.group * tiling.group;
    float constant = 0, slope = 0;
#pragma unroll 4
    for (int i = 0; i < tiling.group; ++i) {
      constant += scratch.products[0][group + i];
      slope += scratch.products[1][group + i];
    }
    constant *= share;
    slope *= share * scratch.inverse[c];
    if constexpr (!kUsesPivot<T>) constant -= scratch.mean[c] * slope;
    scratch.group_terms[0][c] = constant;
    scratch.group_terms[1][c] = slope;
  }
}

// kAdded: tensors that are added to dx. kKeep: tiling.keep, a constant, so that the loops have one
// case's code and registers.
// One function, but for the reduction: its phases share addresses and registers.
template <class T, int V, int kAdded, bool kKeep>
__global__ void __maxnreg__(kRegisters) group_norm_backward(const __grid_constant__ Backward g) {
  const BackwardTiling& tiling = g.tiling;
  const int own = tiling.vectors * V, first = static_cast<int>(blockIdx.y) * own;
  const int threads = static_cast<int>(blockDim.x), sample = static_cast<int>(blockIdx.z);
  const StreamingTile tile(tiling, V);
  const Place place(tiling, tile, g.of.x, sample);
  const Staged<T, V> staged(tiling);
  const BackwardScratch scratch(own, dynamic_smem() + tiling.stage_bytes);

  // Prologue. The first channels' rows are on their way before the copies.
  ChannelRows rows(g.of, sample, first + min(static_cast<int>(threadIdx.x), own - 1));
  {
    Source<T, V> from(g, place);
#pragma unroll 1
    for (int chunk = 0; chunk < kBackwardStages; ++chunk) {
      from.fetch(staged, chunk, tile.steps);
      cp_async_commit();
    }
  }
#pragma unroll
  for (int k = 0; k < kAdded; ++k) {
    const T* added = reinterpret_cast<const T*>(g.of.added[k].data[place.part]) + place.first;
#pragma unroll 1
    for (int i = 0; i < tile.steps; ++i) {
      prefetch_l2(added);
      added += place.step;
    }
  }
#pragma unroll 1
  for (int c = threadIdx.x; c < own; c += threads) {
    if (c >= threads) rows = ChannelRows(g.of, sample, first + c);
    put_coefficients<T>(scratch, c, rows, g.of.silu);
  }
  __syncthreads();
  ChannelAffine<T, V> norm;
  if (tile.steps > 0) {
    load_floats(scratch.factor + tile.local, norm.factor);
    load_floats(scratch.shift + tile.local, norm.shift);
    if constexpr (kUsesPivot<T>) load_floats(scratch.mean + tile.local, norm.mean);
  }

  // The epilogue's place, and what it adds there, which is loaded one step ahead.
  T* dx = reinterpret_cast<T*>(g.of.dx.data[place.part]) + place.first +
          static_cast<int64_t>(tile.steps - 1) * place.step;
  const char* next = reinterpret_cast<const char*>(dx);
  Vector<T, V> others[kAdded > 0 ? kAdded : 1];
  int others_left = kAdded > 0 ? tile.steps : 0;
  const auto load_others = [&] {
    if (others_left-- > 0) {
#pragma unroll
      for (int k = 0; k < kAdded; ++k)
        others[k] = load_read_only(reinterpret_cast<const Vector<T, V>*>(
            next + (g.of.added[k].data[place.part] - g.of.dx.data[place.part])));
      next -= place.step * static_cast<int>(sizeof(T));
    }
  };

  // Mainloop.
  {
    float constant[V] = {}, slope[V] = {};
    T* active_to = static_cast<T*>(g.of.active) + place.flat;
#pragma unroll 1
    for (int chunk = 0; chunk < tiling.chunks; ++chunk) {
      cp_async_wait<kBackwardStages - 1>();
      const int count = min(tile.steps - chunk * tiling.chunk_steps, tiling.chunk_steps);
      Vector<T, V>* slot = staged.slot(chunk, 0);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float value[V], given[V], active[V];
        unpack(*slot, value);
        unpack(slot[staged.dy], given);
        norm.centre(value);
        differentiate<T, V, true>(norm, g.of.silu, value, given, active);
        if constexpr (kKeep) staged.keep(slot, given);
        slot += staged.pitch;
        if (g.of.active) {
          Vector<T, V> out;
          out.from_floats(active);
          *reinterpret_cast<Vector<T, V>*>(active_to) = out;
          active_to += place.flat_step;
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          constant[j] += given[j];
          slope[j] += given[j] * value[j];
        }
      }
      if (!kKeep && chunk + kBackwardStages < tiling.chunks)
        fetch_again(g, tile, place, staged, chunk + kBackwardStages);
      cp_async_commit();
    }
    load_others();
    reduce<T, V>(g, scratch, tile, constant, slope);
  }
  __syncthreads();
  finish_groups<T>(g, scratch, own);
  __syncthreads();

  // Epilogue.
  if (tile.steps > 0) {
    float constant[V], slope[V];
    if constexpr (kKeep) {
      const float unscale = 1.0f / scale_of_z<T>(g.of.silu);
#pragma unroll
      for (int j = 0; j < V; ++j) norm.factor[j] *= unscale;
    }
    load_floats(scratch.group_terms[0] + tile.local, constant);
    load_floats(scratch.group_terms[1] + tile.local, slope);
#pragma unroll 1
    for (int chunk = (tile.steps - 1) / tiling.chunk_steps; chunk >= 0; --chunk) {
      cp_async_wait<kBackwardStages - 1>();
      const int count = min(tile.steps - chunk * tiling.chunk_steps, tiling.chunk_steps);
      const Vector<T, V>* slot = staged.slot(chunk, count - 1);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        Vector<T, V> now[kAdded > 0 ? kAdded : 1];
#pragma unroll
        for (int k = 0; k < kAdded; ++k) now[k] = others[k];
        load_others();
        float value[V], given[V], active[V];
        unpack(*slot, value);
        norm.centre(value);
        if constexpr (kKeep) {
          staged.read_kept(slot, given);
        } else {
          unpack(slot[staged.dy], given);
          differentiate<T, V, false>(norm, g.of.silu, value, given, active);
        }
        slot -= staged.pitch;
#pragma unroll
        for (int j = 0; j < V; ++j)
          value[j] = norm.factor[j] * given[j] - (constant[j] + value[j] * slope[j]);
#pragma unroll
        for (int k = 0; k < kAdded; ++k) {
          unpack(now[k], given);
#pragma unroll
          for (int j = 0; j < V; ++j) value[j] += given[j];
        }
        Vector<T, V> out;
        out.from_floats(value);
        *reinterpret_cast<Vector<T, V>*>(dx) = out;
        dx -= place.step;
      }
      if (!kKeep && chunk >= kBackwardStages)
        fetch_again(g, tile, place, staged, chunk - kBackwardStages);
      cp_async_commit();
    }
  }
  if (tiling.ranks > 1) cluster_wait();
}

}  // namespace

cudaError_t smem_resident_gradient(const NormGradient& plan, const BackwardTiling& tiling,
                                   int vector, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = 16 / sizeof(T);
    const auto kernel = with_added_count(plan.added_count, [&](auto count) {
      if (vector == 1) return group_norm_backward<T, 1, count, false>;
      return tiling.keep ? group_norm_backward<T, kVector, count, true>
                         : group_norm_backward<T, kVector, count, false>;
    });
    return launch(kernel, grid_of(tiling, plan.batch), tiling.threads,
                  tiling.stage_bytes + tiling.scratch_bytes, stream,
                  Backward{tiling, operands_of(plan)});
  });
}

}  // namespace jaxunet::cuda
