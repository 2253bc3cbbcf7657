// GroupNorm forward: the statistics alone, or with the activation in the same launch.
#include "kernels.h"
#include "slab.cuh"

namespace jaxunet::cuda {
namespace {

struct Forward {
  Slab slab;
  Sources x;
  Rows scale, offset;
  float eps;
  bool silu;
  void* y;                        // null: statistics only
  float *a, *b, *mean, *inverse;  // a, b: null with y
};

// Count, mean and sum of squared deviations of the union of two samples (Chan, Golub & LeVeque 1979).
__device__ void merge(float& n, float& mean, float& deviation, float n2, float mean2, float deviation2) {
  const float total = n + n2, away = mean2 - mean, share = total > 0 ? n2 / total : 0.0f;
  mean += away * share;
  deviation += deviation2 + away * away * n * share;
  n = total;
}

// Statistics of the block's channels, from those of every row of warps: (count, mean, deviation) by channel. Afterwards
// the first row of `partial` holds mean and inverse deviation of each channel's group.
__device__ void combine(const Slab& slab, float eps, int own, float* partial) {
  const int rows = row_warps(slab);
  float* result = partial + 3 * own * rows;
  for (int c = threadIdx.x; c < own; c += blockDim.x) {
    float n = 0, mean = 0, deviation = 0;
    for (int r = 0; r < rows; ++r) {
      const float* from = partial + 3 * (r * own + c);
      merge(n, mean, deviation, from[0], from[1], from[2]);
    }
    result[2 * c] = mean;
    result[2 * c + 1] = deviation;
  }
  __syncthreads();
  const auto pixels = static_cast<float>(slab.pixels), size = static_cast<float>(slab.group);
  for (int c = threadIdx.x; c < own; c += blockDim.x) {
    const float* group = result + 2 * (c / slab.group * slab.group);
    const float first = group[0];
    float mean = 0, variance = 0;
    for (int i = 0; i < slab.group; ++i) mean += group[2 * i] - first;
    mean = first + mean / size;
    for (int i = 0; i < slab.group; ++i) {
      const float away = group[2 * i] - mean;
      variance += group[2 * i + 1] / pixels + away * away;
    }
    partial[2 * c] = mean;
    partial[2 * c + 1] = rsqrtf(variance / size + eps);
  }
  __syncthreads();
}

template <class T, int V>
__global__ void __launch_bounds__(512) group_norm_forward(const Forward f) {
  extern __shared__ __align__(16) char memory[];
  const Slab& slab = f.slab;
  const int own = slab.vectors * V, rows = row_warps(slab), lane = threadIdx.x % 32;
  const Place<T, V> place(slab);
  auto* const held = reinterpret_cast<Vector<T, V>*>(memory);
  auto* const partial = reinterpret_cast<float*>(memory + static_cast<size_t>(slab.held) * blockDim.x * V * sizeof(T));
  const int64_t sample = blockIdx.y;
  int width = 0;
  const T* const x = place.active ? column<T>(f.x, place.channel, sample, slab.pixels, &width) : nullptr;
  const int steps = place.active && place.row < slab.pixels ? (slab.pixels - 1 - place.row) / place.stride + 1 : 0;
  const auto at = [&](int step) {
    return *reinterpret_cast<const Vector<T, V>*>(x + static_cast<int64_t>(place.row + step * place.stride) * width);
  };

  {
    // Deviations from the thread's first pixel: sums of squares that do not cancel.
    float pivot[V] = {}, sum[V] = {}, square[V] = {};
    constexpr int kUnroll = 8;
    for (int step = 0; step < steps; step += kUnroll) {
      Vector<T, V> read[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (step + u < steps) read[u] = at(step + u);
      }
      if (step == 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) pivot[i] = wide(read[0].values[i]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (step + u >= steps) break;
        if (step + u < slab.held) held[(step + u) * blockDim.x + threadIdx.x] = read[u];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float away = wide(read[u].values[i]) - pivot[i];
          sum[i] += away;
          square[i] += away * away;
        }
      }
    }
    const auto count = static_cast<float>(steps);
    const float share = steps ? 1.0f / count : 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float n = count, mean = pivot[i] + sum[i] * share;
      float deviation = fmaxf(square[i] - sum[i] * sum[i] * share, 0.0f);
      for (int step = half_rows(slab); step > 0; step /= 2) {
        const int from = step * slab.lanes;
        const float n2 = __shfl_down_sync(~0u, n, from), mean2 = __shfl_down_sync(~0u, mean, from);
        const float deviation2 = __shfl_down_sync(~0u, deviation, from);
        if (lane / slab.lanes + step < slab.rows) merge(n, mean, deviation, n2, mean2, deviation2);
      }
      if (place.active && lane < slab.lanes) {
        const int row = threadIdx.x / 32 / slab.tiles;
        float* to = partial + 3 * (row * own + place.local + i);
        to[0] = n;
        to[1] = mean;
        to[2] = deviation;
      }
    }
  }
  if (own > slab.channels - static_cast<int>(blockIdx.x) * own) {
    // The last block may have fewer channels: the others are empty.
    for (int i = threadIdx.x; i < 3 * own * rows; i += blockDim.x) {
      if (static_cast<int>(blockIdx.x) * own + i / 3 % own >= slab.channels) partial[i] = 0;
    }
  }
  __syncthreads();
  combine(slab, f.eps, own, partial);

  const int64_t first = blockIdx.x * own, row = sample * slab.channels + first;
  for (int c = threadIdx.x; c < own && first + c < slab.channels; c += blockDim.x) {
    const float mean = partial[2 * c], inverse = partial[2 * c + 1];
    f.mean[row + c] = mean;
    f.inverse[row + c] = inverse;
    if (f.a) {
      const float a = f.scale.data[sample * f.scale.stride + first + c] * inverse;
      f.a[row + c] = a;
      f.b[row + c] = f.offset.data[sample * f.offset.stride + first + c] - mean * a;
    }
  }
  if (!f.y || !steps) return;

  float mean[V], factor[V], offset[V];
  load_row(f.scale, sample, place.channel, factor);
  load_row(f.offset, sample, place.channel, offset);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    mean[i] = partial[2 * (place.local + i)];
    factor[i] *= partial[2 * (place.local + i) + 1];
  }
  T* const y = static_cast<T*>(f.y) + sample * slab.pixels * slab.channels + place.channel;
  // What was read last is nearest.
#pragma unroll 4
  for (int step = steps - 1; step >= 0; --step) {
    Vector<T, V> v = step < slab.held ? held[step * blockDim.x + threadIdx.x] : at(step);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float z = (wide(v.values[i]) - mean[i]) * factor[i] + offset[i];
      narrow(f.silu ? z * sigmoid<T>(z) : z, &v.values[i]);
    }
    *reinterpret_cast<Vector<T, V>*>(y + static_cast<int64_t>(place.row + step * place.stride) * slab.channels) = v;
  }
}

template <class T, int V>
__global__ void __launch_bounds__(256)
    group_norm_apply(int pixels, int channels, Sources x, Rows a, Rows b, bool silu, T* const y) {
  const int vectors = channels / V;
  const int64_t sample = blockIdx.y, count = static_cast<int64_t>(pixels) * vectors;
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    const int64_t pixel = i / vectors;
    const int channel = static_cast<int>(i - pixel * vectors) * V;
    int width = 0;
    const T* const from = column<T>(x, channel, sample, pixels, &width);
    auto v = *reinterpret_cast<const Vector<T, V>*>(from + pixel * width);
    float factor[V], offset[V];
    load_row(a, sample, channel, factor);
    load_row(b, sample, channel, offset);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = wide(v.values[j]) * factor[j] + offset[j];
      narrow(silu ? z * sigmoid<T>(z) : z, &v.values[j]);
    }
    *reinterpret_cast<Vector<T, V>*>(y + (sample * pixels + pixel) * channels + channel) = v;
  }
}

template <class T>
cudaError_t launch_forward(const NormInput& plan, Forward f, cudaStream_t stream) {
  if (plan.batch == 0 || plan.x.total == 0) return cudaSuccess;
  Device device;
  if (const cudaError_t error = describe(&device); error != cudaSuccess) return error;
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = whole_vectors(plan.x, kVector);
  const int vector = vectors ? kVector : 1;
  const int arrays = f.y ? 1 : 0;
  const Shape how = shape(device, plan.batch, plan.pixels, plan.x.total, plan.x.total / plan.groups, vector, sizeof(T),
                          arrays, 512, 3 * sizeof(float));
  f.slab = how.slab;
  f.x = sources(plan.x);
  f.scale = plan.scale;
  f.offset = plan.offset;
  f.eps = plan.eps;
  const auto kernel = vectors ? group_norm_forward<T, kVector> : group_norm_forward<T, 1>;
  return launch(kernel, how, plan.batch, f, stream);
}

cudaError_t forward(const NormInput& plan, const Forward& f, cudaStream_t stream) {
  switch (plan.type) {
    case Type::kFloat32:
      return launch_forward<float>(plan, f, stream);
    case Type::kFloat16:
      return launch_forward<__half>(plan, f, stream);
    default:
      return launch_forward<__nv_bfloat16>(plan, f, stream);
  }
}

template <class T>
cudaError_t launch_apply(const NormApply& plan, cudaStream_t stream) {
  if (plan.batch == 0 || plan.pixels == 0 || plan.x.total == 0) return cudaSuccess;
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = whole_vectors(plan.x, kVector);
  const int64_t count = plan.pixels * plan.x.total / (vectors ? kVector : 1);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((count + 255) / 256, 1 << 20)),
                  static_cast<unsigned>(plan.batch));
  const auto kernel = vectors ? group_norm_apply<T, kVector> : group_norm_apply<T, 1>;
  kernel<<<grid, 256, 0, stream>>>(static_cast<int>(plan.pixels), static_cast<int>(plan.x.total), sources(plan.x),
                                   plan.a, plan.b, plan.silu, static_cast<T*>(plan.y));
  return cudaGetLastError();
}

}  // namespace

cudaError_t norm_forward(const NormForward& plan, cudaStream_t stream) {
  Forward f{};
  f.silu = plan.silu;
  f.y = plan.y;
  f.mean = plan.mean;
  f.inverse = plan.inverse;
  return forward(plan, f, stream);
}

cudaError_t norm_statistics(const NormStatistics& plan, cudaStream_t stream) {
  Forward f{};
  f.a = plan.a;
  f.b = plan.b;
  f.mean = plan.mean;
  f.inverse = plan.inverse;
  return forward(plan, f, stream);
}

cudaError_t norm_apply(const NormApply& plan, cudaStream_t stream) {
  switch (plan.type) {
    case Type::kFloat32:
      return launch_apply<float>(plan, stream);
    case Type::kFloat16:
      return launch_apply<__half>(plan, stream);
    default:
      return launch_apply<__nv_bfloat16>(plan, stream);
  }
}

}  // namespace jaxunet::cuda
