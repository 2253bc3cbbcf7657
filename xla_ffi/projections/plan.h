// Many small linear layers that read the same vectors, and sums of biases (formulas below).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "binding/plan.h"

namespace jaxunet {

class Reader;

constexpr int64_t kMaxBiases = 2;  // of a layer

// y = x · kernel + the sum of the biases, for each sample; without a kernel, one row that is the
// sum of the biases.
struct Projection {
  const void* kernel;                           // (width, features); null: none
  std::array<const float*, kMaxBiases> biases;  // (features); the last ones may be null
  int64_t features;
  float* y;  // (batch, features), or (1, features) without a kernel
};

struct Projections {
  Type type;  // of x and the kernels
  int64_t batch, width;
  const void* x;  // (batch, width)
  std::vector<Projection> layers;
};

// dkernel = xᵀ · dy, dbias = the sum of dy over the samples.
struct ProjectionGradient {
  const void* kernel;  // (width, features)
  const float* dy;     // (batch, features); for the products it is rounded to the type
  int64_t features;
  void* dkernel;  // as kernel
  float* dbias;   // (features)
};

// dx = the sum of dy · kernelᵀ over the layers.
struct ProjectionGradients {
  Type type;
  int64_t batch, width;
  const void* x;
  std::vector<ProjectionGradient> layers;
  void* dx;        // (batch, width)
  float* partial;  // (layers, batch, width), uninitialized: dy · kernelᵀ of every layer
};

Projections read_projections(Reader& call);
ProjectionGradients read_projection_gradients(Reader& call);

}  // namespace jaxunet
