// GroupNorm backward: the sums over pixels and the gradient of every part of x, in one launch.
#include "kernels.h"
#include "slab.cuh"

namespace jaxunet::cuda {
namespace {

struct Backward {
  Slab slab;
  int held_arrays;  // x, or x and dy
  Sources x, dx;
  const void* dy;
  Rows scale, offset, mean, inverse;
  bool silu;
  float* sums;
  void* active;
};

// dz = dy · act'(z), and act(z) itself.
template <class T>
__device__ float derivative(float dy, float z, bool silu, float* active) {
  if (!silu) {
    *active = z;
    return dy;
  }
  const float s = sigmoid<T>(z);
  *active = z * s;
  return dy * (s + *active * (1.0f - s));
}

template <class T, int V, bool kActive>
__global__ void __launch_bounds__(512) group_norm_backward(const Backward g) {
  extern __shared__ __align__(16) char memory[];
  const Slab& slab = g.slab;
  const int own = slab.vectors * V, rows = row_warps(slab), lane = threadIdx.x % 32;
  const Place<T, V> place(slab);
  const size_t array = static_cast<size_t>(slab.held) * blockDim.x;
  auto* const held_x = reinterpret_cast<Vector<T, V>*>(memory);
  auto* const held_dy = held_x + array;
  auto* const partial = reinterpret_cast<float*>(memory + array * g.held_arrays * V * sizeof(T));
  const int64_t sample = blockIdx.y, image = sample * slab.pixels * slab.channels;
  int width = 0;
  const T* const x = place.active ? column<T>(g.x, place.channel, sample, slab.pixels, &width) : nullptr;
  const T* const dy = static_cast<const T*>(g.dy) + image + place.channel;
  const int steps = place.active && place.row < slab.pixels ? (slab.pixels - 1 - place.row) / place.stride + 1 : 0;
  const auto pixel = [&](int step) { return static_cast<int64_t>(place.row + step * place.stride); };
  const auto load = [&](const T* from, int step, int pitch) {
    return *reinterpret_cast<const Vector<T, V>*>(from + pixel(step) * pitch);
  };

  // z = (x - mean) · factor + offset
  float mean[V] = {}, factor[V] = {}, offset[V] = {};
  if (place.active) {
    float inverse[V];
    load_row(g.mean, sample, place.channel, mean);
    load_row(g.inverse, sample, place.channel, inverse);
    load_row(g.scale, sample, place.channel, factor);
    load_row(g.offset, sample, place.channel, offset);
#pragma unroll
    for (int i = 0; i < V; ++i) factor[i] *= inverse[i];
  }

  {
    // Sums of dz and of dz · (x - mean).
    float constant[V] = {}, slope[V] = {};
    constexpr int kUnroll = 2;
    for (int step = 0; step < steps; step += kUnroll) {
      Vector<T, V> read[kUnroll], given[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (step + u < steps) {
          read[u] = load(x, step + u, width);
          given[u] = load(dy, step + u, slab.channels);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (step + u >= steps) break;
        if (step + u < slab.held) {
          held_x[(step + u) * blockDim.x + threadIdx.x] = read[u];
          if (g.held_arrays == 2) held_dy[(step + u) * blockDim.x + threadIdx.x] = given[u];
        }
        Vector<T, V> again;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float away = wide(read[u].values[i]) - mean[i];
          float active;
          const float dz = derivative<T>(wide(given[u].values[i]), away * factor[i] + offset[i], g.silu, &active);
          constant[i] += dz;
          slope[i] += dz * away;
          if constexpr (kActive) narrow(active, &again.values[i]);
        }
        if constexpr (kActive) {
          T* const to = static_cast<T*>(g.active) + image + place.channel + pixel(step + u) * slab.channels;
          *reinterpret_cast<Vector<T, V>*>(to) = again;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float first = constant[i], second = slope[i];
      for (int step = half_rows(slab); step > 0; step /= 2) {
        const float other = __shfl_down_sync(~0u, first, step * slab.lanes);
        const float another = __shfl_down_sync(~0u, second, step * slab.lanes);
        if (lane / slab.lanes + step < slab.rows) {
          first += other;
          second += another;
        }
      }
      if (place.active && lane < slab.lanes) {
        float* const to = partial + 2 * (static_cast<int>(threadIdx.x) / 32 / slab.tiles * own + place.local + i);
        to[0] = first;
        to[1] = second;
      }
    }
  }
  __syncthreads();

  // By channel: the sums, and what the group needs of them.
  float* const weighted = partial + 2 * own * rows;
  const int first = static_cast<int>(blockIdx.x) * own;
  for (int c = threadIdx.x; c < own; c += blockDim.x) {
    float constant = 0, slope = 0, scale = 0;
    if (first + c < slab.channels) {
      for (int r = 0; r < rows; ++r) {
        constant += partial[2 * (r * own + c)];
        slope += partial[2 * (r * own + c) + 1];
      }
      slope *= g.inverse.data[sample * g.inverse.stride + first + c];
      scale = g.scale.data[sample * g.scale.stride + first + c];
      float* const to = g.sums + 2 * sample * slab.channels + first + c;
      to[0] = constant;
      to[slab.channels] = slope;
    }
    weighted[2 * c] = scale * constant;
    weighted[2 * c + 1] = scale * slope;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < own && first + c < slab.channels; c += blockDim.x) {
    const float* const group = weighted + 2 * (c / slab.group * slab.group);
    float constant = 0, slope = 0;
    for (int i = 0; i < slab.group; ++i) {
      constant += group[2 * i];
      slope += group[2 * i + 1];
    }
    const float inverse = g.inverse.data[sample * g.inverse.stride + first + c];
    const float share = inverse / (static_cast<float>(slab.group) * static_cast<float>(slab.pixels));
    partial[2 * c] = constant * share;
    partial[2 * c + 1] = slope * share * inverse;
  }
  __syncthreads();
  if (!steps) return;

  float constant[V], slope[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    constant[i] = partial[2 * (place.local + i)];
    slope[i] = partial[2 * (place.local + i) + 1];
  }
  T* const dx = column<T>(g.dx, place.channel, sample, slab.pixels, &width);
  // What was read last is nearest.
#pragma unroll 2
  for (int step = steps - 1; step >= 0; --step) {
    const size_t at = step * blockDim.x + threadIdx.x;
    Vector<T, V> v = step < slab.held ? held_x[at] : load(x, step, width);
    const Vector<T, V> given = step < slab.held && g.held_arrays == 2 ? held_dy[at] : load(dy, step, slab.channels);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float away = wide(v.values[i]) - mean[i];
      float active;
      const float dz = derivative<T>(wide(given.values[i]), away * factor[i] + offset[i], g.silu, &active);
      narrow(factor[i] * dz - (constant[i] + away * slope[i]), &v.values[i]);
    }
    *reinterpret_cast<Vector<T, V>*>(dx + pixel(step) * width) = v;
  }
}

template <class T>
cudaError_t launch_backward(const NormGradient& plan, cudaStream_t stream) {
  if (plan.batch == 0 || plan.x.total == 0) return cudaSuccess;
  Device device;
  if (const cudaError_t error = describe(&device); error != cudaSuccess) return error;
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = whole_vectors(plan.x, kVector);
  const Shape how = shape(device, plan.batch, plan.pixels, plan.x.total, plan.x.total / plan.groups,
                          vectors ? kVector : 1, sizeof(T), 2, 512, 2 * sizeof(float));
  const Backward g{how.slab,    how.held_arrays, sources(plan.x), sources(plan.dx), plan.dy,   plan.scale,
                   plan.offset, plan.mean,       plan.inverse,    plan.silu,        plan.sums, plan.active};
  auto kernel = vectors ? group_norm_backward<T, kVector, false> : group_norm_backward<T, 1, false>;
  if (plan.active) kernel = vectors ? group_norm_backward<T, kVector, true> : group_norm_backward<T, 1, true>;
  return launch(kernel, how, plan.batch, g, stream);
}

}  // namespace

cudaError_t norm_gradient(const NormGradient& plan, cudaStream_t stream) {
  switch (plan.type) {
    case Type::kFloat32:
      return launch_backward<float>(plan, stream);
    case Type::kFloat16:
      return launch_backward<__half>(plan, stream);
    default:
      return launch_backward<__nv_bfloat16>(plan, stream);
  }
}

}  // namespace jaxunet::cuda
