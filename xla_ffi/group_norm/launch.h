// The implementations that dispatch.cu chooses from, and their outputs. `vector`: channels per
// load.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "backward_smem_resident_tiling.h"
#include "forward_register_resident_tiling.h"
#include "plan.h"
#include "statistics_tiling.h"
#include "streaming_tiling.h"
#include "tiling.h"

namespace jaxunet::cuda {

inline int element_bytes(Type type) { return type == Type::kFloat32 ? 4 : 2; }

// Channels per load: 16 bytes of them if that divides the channels of every part, else one.
inline int vector_of(const Parts& x, Type type) {
  const int vector = 16 / element_bytes(type);
  const bool aligned = std::all_of(x.channels.begin(), x.channels.begin() + x.count,
                                   [&](int64_t channels) { return channels % vector == 0; });
  return aligned ? vector : 1;
}

// The outputs of the statistics, each (batch, channels), with z = a * x + b. a and b are null if
// only y is needed.
struct StatisticsOutputs {
  float *a, *b, *mean, *inverse;
};

// The outputs of a forward launch: its input's statistics and, unless null, y = act(z).
struct ForwardOutputs {
  StatisticsOutputs statistics;
  bool silu;
  void* y;
  Dropout dropout{};
};

// forward_register_resident.cu: one launch, for vectors of 16 bytes and groups of an even number of
// channels.
cudaError_t register_resident_forward(const NormInput& plan, const RegisterResidentTiling& tiling,
                                      const ForwardOutputs& to, cudaStream_t stream);
// statistics.cu: one launch, which writes no y.
cudaError_t statistics(const NormInput& plan, const StatisticsTiling& tiling, int vector,
                       const StatisticsOutputs& to, cudaStream_t stream);
// forward_smem_resident.cu: one launch. Throws std::runtime_error if a block cannot hold one group.
cudaError_t smem_resident_forward(const NormInput& plan, const DeviceLimits& limits, int vector,
                                  const ForwardOutputs& to, cudaStream_t stream);
// backward_smem_resident.cu: all gradients except those of scale and offset, in one launch.
cudaError_t smem_resident_gradient(const NormGradient& plan, const BackwardTiling& tiling,
                                   int vector, cudaStream_t stream);
// forward_streaming.cu: two launches, statistics() and then y.
cudaError_t streaming_forward(const NormInput& plan, const StatisticsTiling& first,
                              const StreamingTiling& second, int vector, const ForwardOutputs& to,
                              cudaStream_t stream);
// backward_streaming.cu: all gradients, including those of scale and offset, in two launches.
cudaError_t streaming_gradient(const NormGradient& plan, const StreamingTiling& tiling,
                               const DeviceLimits& limits, int vector, cudaStream_t stream);
// parameter_gradients.cu: dscale and doffset from plan.sums, if the plan asks for them.
cudaError_t launch_parameter_gradients(const NormGradient& plan, cudaStream_t stream);

}  // namespace jaxunet::cuda
