// GroupNorm backward in one launch, except for the gradients of scale and offset:
//   n = (x - mean) * inverse,   z = scale * n + offset,   dz = dy * act'(z),
//   sums = (sum of dz, sum of dz * n) over the pixels, for each channel,
//   dx = inverse * (scale * dz - (S0 + n * S1) / N) + added,
// where S0 and S1 are the sums of scale * dz and of scale * dz * n over the group, and N is the
// number of its elements. parameter_gradients.cu adds `sums` over the batch. dispatch.cu says which
// calls take this kernel; the others take backward_streaming.cu.
//
// A block owns some channels of a sample, always whole groups, and all pixels, or the blocks of a
// cluster share the pixels (backward_smem_resident_tiling.h). `value` is x for 16-bit types, x -
// mean for float32.
// - Prologue: start to copy x and dy to shared memory in kBackwardStages chunks; prefetch the added
//   tensors to L2; load the channels' coefficients through shared memory into registers.
// - Mainloop: chunk by chunk, sum dz and dz * value for each of the thread's channels; write act(z)
//   if requested. With tiling.keep, dz replaces dy in shared memory, so that the epilogue computes
//   no sigmoid; otherwise a later chunk is copied into the stage that became free.
// - Reduction: over the rows of the block (partial sums in shared memory, added by teams of lanes,
//   first dz, then dz * value); over the cluster (every block sends its sums to all blocks); over
//   the channels of the group.
// - Epilogue: dx, from the last chunk backwards. Chunks that left shared memory are copied again.
// With kDrops, dy goes through dropout whenever it is read (StagedDropout).
//
//     global memory           shared memory                     registers
//
//     x, dy   --cp.async-->   stages {x, dy}  -------------->   mainloop: dz, act(z), and sums of
//                             stages {x, dz}, if kept  <-----   dz and dz * value
//     act(z)  <------------------------------------------------   |
//                             partial [row][channel]  <---------  v
//                               | teams of lanes
//                               v
//                             totals [channel]; in a cluster
//                               | st.async to all blocks
//                               v
//                             slots [block][channel]
//                               |
//     sums    <---------------  v
//                             group_terms [channel]  -------->  epilogue, backwards: dx from value,
//     added   ----------------------------------------------->  dz, the group's terms and `added`
//     dx      <-----------------------------------------------
//
// For SiLU in 16-bit types, z is kept as -log2(e) * z, the argument of ex2, or as z / 2, that of
// tanh, and factor is scaled in the same way (scale_of_z). dz is divided by the same number until
// its sums are complete, so that the product factor * dz is right.
//
// Shared memory: the staged chunks (Staged), stage_bytes; BackwardScratch, scratch_bytes.
//
// Synchronisation: staged copies need only cp_async_wait. __syncthreads orders the writes and reads
// of the coefficients in shared memory, and the levels of the reduction. In a cluster, every block
// arrives at the cluster barrier when it starts, and waits there before it sends its sums. Each
// then waits for the sums of all blocks at its mbarrier (Mailbox), and not for act(z) to be
// written.
#include "backward_smem_resident.cuh"
#include "common/dispatch_dtype.cuh"

namespace jaxunet::cuda {
namespace {

// Registers per thread that let three blocks of 256 threads, or two of 384, share a multiprocessor.
constexpr int kRegisters = 80;

// The factor by which z, and so ChannelAffine's coefficients, are scaled.
template <class T>
__device__ float scale_of_z(Act act) {
  if (sizeof(T) == 4 || act == Act::kIdentity) return 1.0f;
  return act == Act::kFastSilu ? 0.5f : -kLog2e;
}

// Replaces dy, passed in `dz`, by dz / scale_of_z, and writes act(z) to `active`. `norm`: scaled
// coefficients.
template <class T, int V>
__device__ void differentiate(const ChannelAffine<T, V>& norm, Act act, const float (&value)[V],
                              float (&dz)[V], float (&active)[V]) {
  if (kFastSilu<T> && act == Act::kFastSilu) {  // with t = tanh(z / 2), sigmoid(z) = (1 + t) / 2
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float half = norm.at(value, j), t = fast_tanh(half), twice = 1.0f + t;
      active[j] = half + half * t;
      dz[j] *= twice + twice * (half - half * t);
    }
  } else if (act == Act::kSilu) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = norm.at(value, j);
      if constexpr (sizeof(T) == 4) {
        dz[j] = silu_gradient<T>(dz[j], z, &active[j]);
      } else {
        const float s = reciprocal(1.0f + power_of_two(z));
        active[j] = z * s * -kLn2;
        dz[j] = dz[j] * s * (z * (kLn2 * kLn2 - kLn2 * kLn2 * s) - kLn2);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) active[j] = norm.at(value, j);
  }
}

// Writes the scaled coefficients of the block's channel c to scratch memory.
template <class T>
__device__ void put_coefficients(const BackwardScratch& scratch, int c, const ChannelRows& rows,
                                 Act act) {
  const float factor = rows.scale * rows.inverse;
  const float shift = kUsesPivot<T> ? rows.offset : rows.offset - rows.mean * factor;
  scratch.factor[c] = factor * scale_of_z<T>(act);
  scratch.shift[c] = shift * scale_of_z<T>(act);
  scratch.mean[c] = rows.mean;
  scratch.inverse[c] = rows.inverse;
}

// Computes g.operands.sums and scratch.products from a channel's sums over all pixels: .x of dz, .y
// of dz * value, both divided by scale_of_z.
template <class T>
__device__ void finish_channel(const Backward& g, const BackwardScratch& scratch, int c,
                               float2 total) {
  const float dz_sum = total.x;
  float product_sum = total.y;
  if constexpr (!kUsesPivot<T>) product_sum -= scratch.mean[c] * dz_sum;
  product_sum *= scratch.inverse[c];  // now the sum of dz * n
  if (blockIdx.x == 0) {
    const int block_channels = g.tiling.channels / g.tiling.channel_blocks;
    float* const to = g.operands.sums + 2 * static_cast<int64_t>(blockIdx.z) * g.tiling.channels +
                      static_cast<int64_t>(blockIdx.y) * block_channels + c;
    const float unit = scale_of_z<T>(g.operands.act);
    to[0] = dz_sum * unit;
    to[g.tiling.channels] = product_sum * unit;
  }
  scratch.products[0][c] = scratch.factor[c] * dz_sum;
  scratch.products[1][c] = scratch.factor[c] * product_sum;
}

// Returns the sum of channel c's rows of partial sums to every lane of its team.
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

// Adds up the threads' sums of dz and dz * value over the block and the cluster, and finishes the
// channels. Afterwards the caller synchronises the block.
template <class T, int V>
__device__ void reduce(const Backward& g, const BackwardScratch& scratch, const StreamingTile& tile,
                       const float (&dz_sum)[V], const float (&product_sum)[V]) {
  const BackwardTiling& tiling = g.tiling;
  const int block_channels = tiling.vectors * V, threads = static_cast<int>(blockDim.x);
  const int teams = threads >> tiling.team_bits;
  const int team = static_cast<int>(threadIdx.x) >> tiling.team_bits, lanes = 1 << tiling.team_bits;
  const int member = static_cast<int>(threadIdx.x) & (lanes - 1);
  float* const mine = scratch.partial + tile.row * scratch.stride + tile.local;
  if (tile.row < tiling.rows) store_floats(mine, dz_sum);
  __syncthreads();
  // All lanes run the same number of iterations, because the shuffles need every lane.
#pragma unroll 1
  for (int base = 0; base < block_channels; base += teams) {
    const int c = base + team;
    const float sum = sum_rows(tiling, scratch, c, c < block_channels);
    if (member == 0 && c < block_channels) scratch.totals[c] = sum;
  }
  __syncthreads();
  if (tile.row < tiling.rows) store_floats(mine, product_sum);
  if (tiling.ranks > 1) scratch.mailbox.wait_open();
  __syncthreads();
#pragma unroll 1
  for (int base = 0; base < block_channels; base += teams) {
    const int c = base + team;
    const float sum = sum_rows(tiling, scratch, c, c < block_channels);
    if (c >= block_channels) continue;
    const float2 both = make_float2(scratch.totals[c], sum);
    if (tiling.ranks == 1) {
      if (member == 0) finish_channel<T>(g, scratch, c, both);
      continue;
    }
#pragma unroll 1
    for (int rank = member; rank < tiling.ranks; rank += lanes)  // the team's lanes divide them
      scratch.mailbox.send(rank, static_cast<int>(blockIdx.x) * block_channels + c, both);
  }
  if (tiling.ranks == 1) return;
  scratch.mailbox.wait_full(tiling.ranks * block_channels * static_cast<int>(sizeof(float2)));
#pragma unroll 1
  for (int c = threadIdx.x; c < block_channels; c += threads) {
    float2 total{};
#pragma unroll 4
    for (int rank = 0; rank < tiling.ranks; ++rank) {
      const float2 part = scratch.mailbox.slots[rank * block_channels + c];
      total.x += part.x;
      total.y += part.y;
    }
    finish_channel<T>(g, scratch, c, total);
  }
}

// Computes scratch.group_terms of each channel: what dx subtracts for its group.
template <class T>
__device__ void finish_groups(const Backward& g, const BackwardScratch& scratch,
                              int block_channels) {
  const BackwardTiling& tiling = g.tiling;
  const float share = 1.0f / (static_cast<float>(tiling.group) * static_cast<float>(tiling.pixels));
#pragma unroll 1
  for (int c = threadIdx.x; c < block_channels; c += static_cast<int>(blockDim.x)) {
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

// kAdded: number of tensors added to dx. kKeep: tiling.keep as a constant, so that the loops
// contain the code and registers of only one case. kDrops: dy goes through dropout first; requires
// silu, and act(z) is not written. One long function, because its phases share addresses and
// registers.
template <class T, int V, int kAdded, bool kKeep, bool kDrops = false>
__global__ void __maxnreg__(kRegisters) group_norm_backward(const __grid_constant__ Backward g) {
  const BackwardTiling& tiling = g.tiling;
  const int block_channels = tiling.vectors * V,
            first_channel = static_cast<int>(blockIdx.y) * block_channels;
  const int threads = static_cast<int>(blockDim.x), sample = static_cast<int>(blockIdx.z);
  const StreamingTile tile(tiling, V);
  const Place place(tiling, tile, g.operands.x, sample);
  const Staged<T, V> staged(tiling);
  const BackwardScratch scratch(block_channels, tiling.ranks, dynamic_smem() + tiling.stage_bytes);
  if (tiling.ranks > 1) scratch.mailbox.open(true);
  const StagedDropout<T, V, kKeep, kDrops> dropout(g, tile);
  const Act act = kDrops ? Act::kSilu : g.operands.act;

  // Prologue. The coefficients of the first channels are requested before the copies.
  ChannelRows rows(g.operands, sample,
                   first_channel + min(static_cast<int>(threadIdx.x), block_channels - 1));
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
    const T* added = reinterpret_cast<const T*>(g.operands.added[k].data[place.part]) + place.first;
#pragma unroll 1
    for (int i = 0; i < tile.steps; ++i) {
      prefetch_l2(added);
      added += place.step;
    }
  }
#pragma unroll 1
  for (int c = threadIdx.x; c < block_channels; c += threads) {
    if (c >= threads) rows = ChannelRows(g.operands, sample, first_channel + c);
    put_coefficients<T>(scratch, c, rows, g.operands.act);
  }
  __syncthreads();
  ChannelAffine<T, V> norm;
  if (tile.steps > 0) {
    load_floats(scratch.factor + tile.local, norm.factor);
    load_floats(scratch.shift + tile.local, norm.shift);
    if constexpr (kUsesPivot<T>) load_floats(scratch.mean + tile.local, norm.mean);
  }
  dropout.prepare(staged, tile.steps);

  // Where the epilogue writes.
  T* dx = reinterpret_cast<T*>(g.operands.dx.data[place.part]) + place.first +
          static_cast<int64_t>(tile.steps - 1) * place.step;
  AddedTensors<T, V, kAdded, kKeep ? kStepsAhead[kAdded] : 1> others(g, place, dx, tile.steps);

  // Mainloop.
  {
    float dz_sum[V] = {}, product_sum[V] = {};
    T* active_to = static_cast<T*>(g.operands.active) + place.flat;
#pragma unroll 1
    for (int chunk = 0; chunk < tiling.chunks; ++chunk) {
      cp_async_wait<kBackwardStages - 1>();
      const int count = min(tile.steps - chunk * tiling.chunk_steps, tiling.chunk_steps);
      Vector<T, V>* slot = staged.slot(chunk, 0);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float value[V], dz[V], active[V];
        const uint32_t dropped = dropout.bits(staged, slot, chunk * tiling.chunk_steps + i);
        unpack(*slot, value);
        dropout.read(staged, slot, dropped, dz);
        norm.centre(value);
        differentiate(norm, act, value, dz, active);
        if constexpr (kKeep) staged.keep(slot, dz);
        slot += staged.pitch;
        if (!kDrops && g.operands.active) {
          Vector<T, V> out;
          out.from_floats(active);
          *reinterpret_cast<Vector<T, V>*>(active_to) = out;
          active_to += place.flat_step;
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dz_sum[j] += dz[j];
          product_sum[j] += dz[j] * value[j];
        }
      }
      if (!kKeep && chunk + kBackwardStages < tiling.chunks)
        fetch_again(g, tile, place, staged, chunk + kBackwardStages);
      cp_async_commit();
    }
    others.start();
    reduce<T, V>(g, scratch, tile, dz_sum, product_sum);
  }
  __syncthreads();
  finish_groups<T>(g, scratch, block_channels);
  __syncthreads();

  // Epilogue.
  if (tile.steps > 0) {
    float constant[V], slope[V];
    load_floats(scratch.group_terms[0] + tile.local, constant);
    load_floats(scratch.group_terms[1] + tile.local, slope);
    // Writes dx of a step. `slot`: of those in flight, the one of its added vectors.
    const auto write = [&](float (&value)[V], float (&dz)[V], int slot) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        value[j] = norm.factor[j] * dz[j] - (constant[j] + value[j] * slope[j]);
      others.add(slot, value, dz);
      Vector<T, V> out;
      out.from_floats(value);
      *reinterpret_cast<Vector<T, V>*>(dx) = out;
      dx -= place.step;
    };
    if constexpr (kKeep) {  // all steps are in shared memory, so the chunks do not matter
      Vector<T, V>* slot = staged.slot(0, tile.steps - 1);
#pragma unroll 1
      for (int left = tile.steps; left > 0; left -= others.kAhead) {
#pragma unroll
        for (int i = 0; i < others.kAhead; ++i) {
          if (i > 0 && i >= left) break;
          float value[V], dz[V];
          unpack(*slot, value);
          norm.centre(value);
          staged.read_kept(slot, dz);
          slot -= staged.pitch;
          write(value, dz, i);
        }
      }
    } else {
#pragma unroll 1
      for (int chunk = (tile.steps - 1) / tiling.chunk_steps; chunk >= 0; --chunk) {
        cp_async_wait<kBackwardStages - 1>();
        const int first = chunk * tiling.chunk_steps,
                  count = min(tile.steps - first, tiling.chunk_steps);
        Vector<T, V>* slot = staged.slot(chunk, count - 1);
#pragma unroll 1
        for (int i = count - 1; i >= 0; --i) {
          float value[V], dz[V], active[V];
          unpack(*slot, value);
          norm.centre(value);
          dropout.read(staged, slot, dropout.bits(staged, slot, first + i), dz);
          differentiate(norm, act, value, dz, active);
          slot -= staged.pitch;
          write(value, dz, 0);
        }
        if (chunk >= kBackwardStages) fetch_again(g, tile, place, staged, chunk - kBackwardStages);
        cp_async_commit();
      }
    }
  }
}

}  // namespace

cudaError_t smem_resident_gradient(const NormGradient& plan, const BackwardTiling& tiling,
                                   int vector, cudaStream_t stream) {
  return dispatch_dtype(plan.type, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = 16 / sizeof(T);
    const auto kernel = with_added_count(plan.added_count, [&](auto count) {
      if (plan.dropout.seeds)
        return tiling.keep ? group_norm_backward<T, kVector, 0, true, true>
                           : group_norm_backward<T, kVector, 0, false, true>;
      if (vector == 1) return group_norm_backward<T, 1, count, false>;
      return tiling.keep ? group_norm_backward<T, kVector, count, true>
                         : group_norm_backward<T, kVector, count, false>;
    });
    return launch_row_clusters(kernel, grid_of(tiling, plan.batch), tiling.threads,
                               tiling.stage_bytes + tiling.scratch_bytes, stream,
                               Backward{tiling, operands_of(plan), plan.dropout});
  });
}

}  // namespace jaxunet::cuda
