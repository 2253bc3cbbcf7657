// The parts of backward_smem_resident.cu: a thread's vectors of x and dy in global memory and their
// staged copies in shared memory, dropout of dy, the channels' rows, the block's scratch memory,
// and conversions of vectors to and from float32. StreamingTile (streaming.cuh) divides the pixels
// among the threads.
#pragma once

#include "backward_smem_resident_tiling.h"
#include "dropout.cuh"
#include "gradient.cuh"
#include "launch.h"
#include "mailbox.cuh"
#include "streaming.cuh"

namespace jaxunet::cuda {

// The kernel's parameters.
struct Backward {
  BackwardTiling tiling;
  GradientOperands operands;
  Dropout dropout;
};

// Vector::to_floats, but with cheaper integer instructions for bfloat16.
template <class T, int V>
__device__ void unpack(const Vector<T, V>& from, float (&to)[V]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && V % 2 == 0) {
    const auto* const pairs = reinterpret_cast<const uint32_t*>(from.values);
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      to[2 * i] = __uint_as_float(pairs[i] << 16);
      to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  } else {
    from.to_floats(to);
  }
}

// Stores V floats; `to` is aligned as vectors of channels are.
template <int V>
__device__ void store_floats(float* to, const float (&from)[V]) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4)
      *reinterpret_cast<float4*>(to + i) =
          make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = from[i];
  }
}

// Where a thread's vectors lie in global memory: in tensors that have the parts of x, and in
// tensors that have all channels in one array (dy, act(z)).
struct Place {
  int part;             // the part of x that has the thread's channels
  int64_t first, flat;  // elements before the first vector, in the part and in one array
  int step, flat_step;  // elements from one step to the next, in the part and in one array
  __device__ Place(const BackwardTiling& tiling, const StreamingTile& tile, const TensorParts& x,
                   int sample) {
    int begin = 0;
    part = 0;
#pragma unroll 1
    while (part + 1 < x.count && tile.channel >= begin + x.channels[part])
      begin += x.channels[part++];
    const int64_t pixel = static_cast<int64_t>(sample) * tiling.pixels + tile.pixel;
    first = pixel * x.channels[part] + (tile.channel - begin);
    flat = pixel * tiling.channels + tile.channel;
    step = tile.stride * x.channels[part];
    flat_step = tile.stride * tiling.channels;
  }
};

// A thread's staged copies of x and dy, or dz after it has replaced dy. A thread reads only what it
// copied itself, so cp_async_wait suffices and no barrier is needed.
//
// Layout: two or three arrays (staged_arrays), each [stage][step of the chunk][thread]: x; dy, or
// the first 4 channels of dz; for 16-bit types with `keep`, the other 4 channels of dz.
template <class T, int V>
struct Staged {
  Vector<T, V>* slots;  // of x
  int pitch;            // vectors from one step to the next
  int dy;               // vectors from x to dy
  int chunk_steps;

  __device__ explicit Staged(const BackwardTiling& tiling)
      : slots(reinterpret_cast<Vector<T, V>*>(dynamic_smem()) + threadIdx.x),
        pitch(tiling.rows * tiling.vectors),
        dy(static_cast<int>(tiling.stage_bytes / (tiling.keep && sizeof(T) == 2 ? 3 : 2) /
                            sizeof(Vector<T, V>))),
        chunk_steps(tiling.chunk_steps) {}
  __device__ Vector<T, V>* slot(int chunk, int i) const {
    return slots + ((chunk & (kBackwardStages - 1)) * chunk_steps + i) * pitch;
  }
  // Replaces the dy of a slot by dz, as float32.
  __device__ void keep(Vector<T, V>* slot, const float (&dz)[V]) const {
    if constexpr (V > 1) {
      *reinterpret_cast<float4*>(slot + dy) = make_float4(dz[0], dz[1], dz[2], dz[3]);
      if constexpr (V == 8)
        *reinterpret_cast<float4*>(slot + 2 * dy) = make_float4(dz[4], dz[5], dz[6], dz[7]);
    }
  }
  __device__ void read_kept(const Vector<T, V>* slot, float (&dz)[V]) const {
    if constexpr (V > 1) {
      float low[4];
      load_floats(reinterpret_cast<const float*>(slot + dy), low);
#pragma unroll
      for (int j = 0; j < 4; ++j) dz[j] = low[j];
      if constexpr (V == 8) {
        load_floats(reinterpret_cast<const float*>(slot + 2 * dy), low);
#pragma unroll
        for (int j = 0; j < 4; ++j) dz[4 + j] = low[j];
      }
    }
  }
};

// Tells which elements of a thread's dy are dropped, as one bit per element of a vector. If shared
// memory has a third array for dz, the hash of all steps is computed while x and dy are being
// copied, and its bits are stored there until dz overwrites them. Otherwise each step computes its
// own.
template <class T, int V, bool kKeep, bool kDrops>
struct StagedDropout {
  static constexpr bool kAhead = kDrops && kKeep && V * sizeof(float) == 32;
  SampleDropout<T, V, kDrops> sample;
  uint32_t first, stride;  // position of the thread's first vector; distance to the next

  __device__ StagedDropout(const Backward& g, const StreamingTile& tile)
      : sample(g.dropout, blockIdx.z),
        first(sample.position(tile.pixel, g.tiling.channels, tile.channel)),
        stride(sample.position(tile.stride, g.tiling.channels, 0)) {}
  // Computes the bits of all steps; each of them has a slot of its own in shared memory.
  __device__ void prepare(const Staged<T, V>& staged, int steps) const {
    if constexpr (kAhead) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step)
        *place(staged, staged.slot(0, step)) = sample.bits(first + step * stride);
    }
  }
  // The bits of a step. Call before dz replaces dy in the step's slot.
  __device__ uint32_t bits(const Staged<T, V>& staged, Vector<T, V>* slot, int step) const {
    if constexpr (kAhead) return *place(staged, slot);
    return sample.bits(first + step * stride);
  }
  // The dy of a slot as float32, after dropout.
  __device__ void read(const Staged<T, V>& staged, const Vector<T, V>* slot, uint32_t bits,
                       float (&dy)[V]) const {
    if constexpr (kDrops) {
      Vector<T, V> here = slot[staged.dy];
      sample.scale(here.values);
      unpack(here, dy);
      sample.drop(bits, dy);
    } else {
      unpack(slot[staged.dy], dy);
    }
  }

 private:
  __device__ static uint32_t* place(const Staged<T, V>& staged, Vector<T, V>* slot) {
    return reinterpret_cast<uint32_t*>(slot + 2 * staged.dy);
  }
};

// A thread's x and dy in global memory.
template <class T, int V>
struct Source {
  const T *x, *dy;
  int x_step, dy_step;

  __device__ Source(const Backward& g, const Place& place)
      : x(reinterpret_cast<const T*>(g.operands.x.data[place.part]) + place.first),
        dy(static_cast<const T*>(g.operands.dy) + place.flat),
        x_step(place.step),
        dy_step(place.flat_step) {}
  __device__ void skip(int steps) {
    x += static_cast<int64_t>(steps) * x_step;
    dy += static_cast<int64_t>(steps) * dy_step;
  }
  // Starts to copy the steps of a chunk. `steps`: of all chunks.
  __device__ void fetch(const Staged<T, V>& staged, int chunk, int steps) {
    const int count = min(steps - chunk * staged.chunk_steps, staged.chunk_steps);
    Vector<T, V>* to = staged.slot(chunk, 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if constexpr (V * sizeof(T) == 16) {
        cp_async_16(to, x);
        cp_async_16(to + staged.dy, dy);
      } else {
        *to = *reinterpret_cast<const Vector<T, V>*>(x);
        to[staged.dy] = *reinterpret_cast<const Vector<T, V>*>(dy);
      }
      x += x_step;
      dy += dy_step;
      to += staged.pitch;
    }
  }
};

// Starts to copy a chunk again, which is not the next one in order.
template <class T, int V>
__device__ void fetch_again(const Backward& g, const StreamingTile& tile, const Place& place,
                            const Staged<T, V>& staged, int chunk) {
  Source<T, V> from(g, place);
  from.skip(chunk * staged.chunk_steps);
  from.fetch(staged, chunk, tile.steps);
}

// Steps of the epilogue for which a thread has the added vectors in flight, by the number of added
// tensors, if dz stays in shared memory: as many as there are registers for.
constexpr int kStepsAhead[] = {1, 4, 2};

// A thread's vectors of the tensors that are added to dx, from the last step backwards. Those of
// kSteps steps are in registers or being loaded.
template <class T, int V, int kAdded, int kSteps>
struct AddedTensors {
  static constexpr int kAhead = kSteps;
  Vector<T, V> vectors[kAhead][kAdded > 0 ? kAdded : 1];
  const Backward& g;
  const Place& place;
  const char* next;  // the vector of dx to which the next ones are added
  int left;          // steps that are not loaded yet

  // dx: of the last step.
  __device__ AddedTensors(const Backward& backward, const Place& at, const T* dx, int steps)
      : g(backward), place(at), next(reinterpret_cast<const char*>(dx)), left(steps) {}
  __device__ void start() {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) load(slot);
  }
  // Adds a step's vectors to `value`, and starts to load those of kAhead steps later. Overwrites
  // `scratch`, so that it needs no registers of its own.
  __device__ void add(int slot, float (&value)[V], float (&scratch)[V]) {
#pragma unroll
    for (int k = 0; k < kAdded; ++k) {
      unpack(vectors[slot][k], scratch);
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] += scratch[j];
    }
    load(slot);
  }

 private:
  __device__ void load(int slot) {
    if constexpr (kAdded > 0) {
      if (left-- <= 0) return;
#pragma unroll
      for (int k = 0; k < kAdded; ++k)
        vectors[slot][k] = load_read_only(reinterpret_cast<const Vector<T, V>*>(
            next + (g.operands.added[k].data[place.part] - g.operands.dx.data[place.part])));
      next -= place.step * static_cast<int>(sizeof(T));
    }
  }
};

// One channel's entries in the rows of the sample.
struct ChannelRows {
  float scale, offset, mean, inverse;
  __device__ ChannelRows(const GradientOperands& operands, int sample, int channel)
      : scale(*channel_entry(operands.scale, sample, channel)),
        offset(*channel_entry(operands.offset, sample, channel)),
        mean(*channel_entry(operands.mean, sample, channel)),
        inverse(*channel_entry(operands.inverse, sample, channel)) {}
};

// The block's scratch memory, in this order; [channels] each, but for the mailbox and `partial`.
struct BackwardScratch {
  Mailbox mailbox;  // if ranks > 1, slots [rank][channel]: .x, .y: sums of dz and of dz * value
  float* totals;    // the block's sums of dz
  float *factor, *shift, *mean, *inverse;  // z * scale_of_z = value * factor + shift
  float* products[2];                      // factor times the sums of dz and dz * n over all pixels
  float* group_terms[2];  // what dx subtracts for the group: group_terms[0] + value * [1]
  float* partial;         // [rows][stride]: one sum per thread
  int stride;

  __device__ BackwardScratch(int channels, int ranks, char* memory) {
    mailbox.full = reinterpret_cast<Barrier*>(memory);
    mailbox.slots = reinterpret_cast<float2*>(memory + kMailboxBarrierBytes);
    totals = reinterpret_cast<float*>(memory + mailbox_bytes(ranks, channels));
    factor = totals + channels;
    shift = factor + channels;
    mean = shift + channels;
    inverse = mean + channels;
    products[0] = inverse + channels;
    products[1] = products[0] + channels;
    group_terms[0] = products[1] + channels;
    group_terms[1] = group_terms[0] + channels;
    partial = group_terms[1] + channels;
    stride = partial_stride(channels);
  }
};

}  // namespace jaxunet::cuda
