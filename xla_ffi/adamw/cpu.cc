#include "../cpu.h"

#include <algorithm>

namespace jaxunet::cpu {

void sum_of_squares(const SumOfSquares& plan, Pool&) {
  float* to = plan.partial;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    for (int64_t start = 0; start < plan.sizes[i]; start += plan.chunk) {
      double total = 0;
      for (int64_t j = start; j < std::min(start + plan.chunk, plan.sizes[i]); ++j) {
        total += static_cast<double>(plan.tensors[i][j]) * plan.tensors[i][j];
      }
      *to++ = static_cast<float>(total);
    }
  }
}

void adamw(const AdamW& plan, Pool& pool) {
  const float* s = plan.scalars;
  if (s[0] == 0) return;
  parallel(pool, static_cast<int64_t>(plan.sizes.size()), [&](int64_t tensor) {
    float* const* arrays = plan.arrays.data() + tensor * plan.kinds();
    for (int64_t i = 0; i < plan.sizes[tensor]; ++i) {
      const float g = arrays[0][i] * s[1];
      float &p = arrays[1][i], &m = arrays[2][i], &v = arrays[3][i];
      m = plan.b1 * m + plan.rest1 * g;
      v = plan.b2 * v + plan.rest2 * (g * g);
      p -= s[2] * (m / s[3] / (std::sqrt(v / s[4]) + plan.eps) + plan.decay * p);
      for (int64_t a = 0; a < plan.averages; ++a) arrays[4 + a][i] += s[kAdamWScalars + a] * (p - arrays[4 + a][i]);
    }
  });
}

void narrow_all(const Narrow& plan, Pool& pool) {
  parallel(pool, static_cast<int64_t>(plan.sizes.size()), [&](int64_t tensor) {
    const auto* from = static_cast<const float*>(plan.arrays[2 * tensor]);
    narrow({from, from + plan.sizes[tensor]}, plan.type, const_cast<void*>(plan.arrays[2 * tensor + 1]));
  });
}

}  // namespace jaxunet::cpu
