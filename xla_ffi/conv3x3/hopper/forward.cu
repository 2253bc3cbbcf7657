// The host side of the Hopper forward convolution: the choice of a tile and the tensor maps. The
// kernel is in forward.cuh, its launches in forward_instances.cuh.

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "conv3x3/dispatch.h"
#include "conv3x3/hopper/forward.h"
#include "conv3x3/kernels.h"

namespace jaxunet::cuda {
namespace forward {
namespace {

// Returns the counter of the launches that write to y; -1 if there is none left. Launches that run
// at the same time write to different arrays, so each has a counter to itself, in any stream and in
// any graph. There are more counters than arrays in most programs.
int counter_of(const void* y) {
  static std::mutex mutex;
  static std::unordered_map<const void*, int> counters;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = counters.find(y);
  if (found != counters.end()) return found->second;
  const int next = static_cast<int>(counters.size());
  if (next == kTileCounters) return -1;
  counters.emplace(y, next);
  return next;
}

}  // namespace

int distribute(const void* y, int multiprocessors, Parameters* p) {
  const int blocks = std::min(p->schedule.tiles, multiprocessors);
  p->counter = draws_tiles(p->schedule.tiles, blocks) ? counter_of(y) : -1;
  return blocks;
}

cudaError_t parameters(const Tile& tile, const Conv3x3& plan, Parameters* p) {
  set_schedule({tile, plan.batch, plan.height, plan.width, static_cast<int>(chunks_of(plan.x)),
                static_cast<int>(chunks_of(plan.projected)), plan.features},
               p);
  p->features = static_cast<int>(plan.features);
  p->residual = plan.residual.count > 0 && !plan.wide;
  p->shift = plan.shift;
  p->a = plan.a;
  p->b = plan.b;
  cudaError_t error = cudaSuccess;
  // Weight maps, innermost dimension first: features or channels, whichever is contiguous, then the
  // other, then taps.
  const auto map = [&](CUtensorMap* to, const void* data, std::initializer_list<int64_t> dimensions,
                       std::initializer_list<int> box) {
    if (error == cudaSuccess) error = tensor_map(to, plan.type, data, dimensions, box);
  };
  constexpr int kHalo = 2;  // one pixel on either side
  const auto image = [&](CUtensorMap* to, const void* data, int64_t channels, int halo) {
    if (error != cudaSuccess) return;
    error = image_map(to, plan.type, data, {plan.batch, plan.height, plan.width, channels},
                      {tile.samples, tile.rows + halo, tile.strip_columns() + halo, kChunk},
                      tile.packed());
  };
  p->x_parts = plan.x.count;
  for (int i = 0; i < plan.x.count; ++i) {
    p->x_channels[i] = static_cast<int>(plan.x.channels[i]);
    image(&p->maps.x[i], plan.x.data[i], plan.x.channels[i], kHalo);
  }
  if (p->residual) image(&p->maps.residual, plan.residual.data[0], plan.features, 0);
  p->projected_parts = plan.projected.count;
  if (plan.projected.count > 0) {
    for (int i = 0; i < plan.projected.count; ++i) {
      p->projected_channels[i] = static_cast<int>(plan.projected.channels[i]);
      image(&p->maps.projected[i], plan.projected.data[i], plan.projected.channels[i], kHalo);
    }
    if (plan.flipped) {
      map(&p->maps.shortcut, plan.shortcut, {plan.projected.total, plan.features, 1},
          {kChunk, tile.features, 1});
    } else {
      map(&p->maps.shortcut, plan.shortcut, {plan.features, plan.projected.total, 1},
          {kChunk, kChunk, 1});
    }
  }
  if (plan.x.count > 0 && plan.flipped) {
    map(&p->maps.kernel, plan.kernel, {plan.x.total, plan.features, 9},
        {kChunk, tile.features, tile.taps});
  } else if (plan.x.count > 0) {
    map(&p->maps.kernel, plan.kernel, {plan.features, plan.x.total, 9},
        {kChunk, kChunk, tile.taps});
  }
  p->y_parts = plan.wide ? 0 : plan.y.count;
  for (int i = 0; i < p->y_parts; ++i) {
    p->y_channels[i] = static_cast<int>(plan.y.channels[i]);
    image(&p->maps.y[i], plan.y.data[i], plan.y.channels[i], 0);
  }
  return error;
}

cudaError_t parameters(const Tile& tile, const Conv3x3& plan, WideParameters* p) {
  p->wide_y = static_cast<float*>(plan.y.data[0]);
  p->wide_residual =
      plan.residual.count > 0 ? static_cast<const float*>(plan.residual.data[0]) : nullptr;
  return parameters(tile, plan, static_cast<Parameters*>(p));
}

}  // namespace forward

namespace {

int tile_of(const Conv3x3& plan, int multiprocessors) {
  return quickest_tile(plan.a.data != nullptr, multiprocessors, plan.batch, plan.height, plan.width,
                       static_cast<int>(chunks_of(plan.x)),
                       static_cast<int>(chunks_of(plan.projected)), plan.features);
}

const forward::Launches& launches_of(Type type) {
  return type == Type::kFloat16 ? forward::kLaunchesFloat16 : forward::kLaunchesBfloat16;
}

}  // namespace

cudaError_t hopper_forward(const Conv3x3& plan, int multiprocessors, cudaStream_t stream) {
  if (plan.batch == 0 || plan.features == 0) return cudaSuccess;  // no tensor map of an empty array
  const int tile = tile_of(plan, multiprocessors);
  const auto choose = [&](const auto& all) {
    return (plan.flipped ? all.flipped : all.forward)[tile];
  };
  const auto run = plan.wide ? choose(forward::kWideLaunches) : choose(launches_of(plan.type));
  return run ? run(plan, multiprocessors, stream) : cudaErrorInvalidValue;
}

}  // namespace jaxunet::cuda
