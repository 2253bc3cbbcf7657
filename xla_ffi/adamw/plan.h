// What is done to many tensors at once: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), the gradients' norm, copies
// of 16 bits. Gradients have the type of the weights that they are of: float32, or 16 bits of narrowed ones.
#pragma once

#include <vector>

#include "../plan.h"

namespace jaxunet {

class Reader;

// partial[i] = sum of squares of the i-th chunk, the tensors' chunks one after the other.
struct SumOfSquares {
  int64_t chunk;
  std::vector<int64_t> sizes;
  std::vector<Type> types;
  std::vector<const void*> tensors;
  float* partial;
};

// One step, in place: g = gradient · factor, m = b1 · m + rest1 · g, v = b2 · v + rest2 · g²,
// p -= rate · (m / correction1 / (sqrt(v / correction2) + eps) + decay · p), and every average += follow · (p -
// average).
struct AdamW {
  float b1, b2, rest1, rest2, eps, decay;  // rests: 1 - b, which float32 could not tell from b
  int64_t averages;
  std::vector<int64_t> sizes;
  std::vector<Type> types;    // of the gradients; all else is float32
  std::vector<void*> arrays;  // of each tensor: gradient, p, m, v, averages
  const float* scalars;       // whether to step at all, factor, rate, correction1, correction2, follow of every average

  int64_t kinds() const { return 4 + averages; }
};

constexpr int64_t kAdamWScalars = 5;

// Every tensor in 16 bits.
struct Narrow {
  Type type;
  std::vector<int64_t> sizes;
  std::vector<const void*> arrays;  // of each tensor: float32, the result
};

SumOfSquares read_sum_of_squares(Reader& call);
AdamW read_adamw(Reader& call);
Narrow read_narrow_all(Reader& call);

}  // namespace jaxunet
