// AdamW, sums of squares, 16-bit copies and packed gradients on the CPU: plain loops, for tests and
// for machines without a GPU. plan.h has the formulas.
#include "binding/cpu.h"

#include <algorithm>

namespace jaxunet::cpu {

void sum_of_squares(const SumOfSquares& plan, Pool&) {
  float* to = plan.partial;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const std::vector<float> tensor = widen(plan.tensors[i], plan.types[i], plan.sizes[i]);
    for (int64_t start = 0; start < plan.sizes[i]; start += plan.chunk) {
      double total = 0;
      for (int64_t j = start; j < std::min(start + plan.chunk, plan.sizes[i]); ++j) {
        total += static_cast<double>(tensor[j]) * tensor[j];
      }
      *to++ = static_cast<float>(total);
    }
  }
}

void adamw(const AdamW& plan, Pool& pool) {
  const float* s = plan.scalars;
  if (s[kApplied] == 0) return;
  parallel(pool, static_cast<int64_t>(plan.sizes.size()), [&](int64_t tensor) {
    void* const* arrays = plan.arrays.data() + tensor * plan.arrays_per_tensor();
    const std::vector<float> gradient =
        widen(arrays[kGradient], plan.types[tensor], plan.sizes[tensor]);
    const auto array = [&](int64_t which) { return static_cast<float*>(arrays[which]); };
    for (int64_t i = 0; i < plan.sizes[tensor]; ++i) {
      const float g = gradient[i] * s[kGradientFactor];
      float &p = array(kParameter)[i], &m = array(kFirstMoment)[i], &v = array(kSecondMoment)[i];
      m = plan.b1 * m + plan.rest1 * g;
      v = plan.b2 * v + plan.rest2 * (g * g);
      p -= s[kLearningRate] *
           (m / s[kCorrection1] / (std::sqrt(v / s[kCorrection2]) + plan.eps) + plan.decay * p);
      for (int64_t a = 0; a < plan.averages; ++a) {
        float& average = array(kFirstAverage + a)[i];
        average += s[kFirstFollow + a] * (p - average);
      }
    }
    if (arrays[plan.copy()]) {
      narrow({array(kParameter), array(kParameter) + plan.sizes[tensor]}, plan.copies,
             arrays[plan.copy()]);
    }
  });
}

void narrow_all(const Narrow& plan, Pool& pool) {
  parallel(pool, static_cast<int64_t>(plan.sizes.size()), [&](int64_t tensor) {
    const auto* from = static_cast<const float*>(plan.arrays[2 * tensor]);
    narrow({from, from + plan.sizes[tensor]}, plan.type,
           const_cast<void*>(plan.arrays[2 * tensor + 1]));
  });
}

void pack(const Pack& plan, Pool& pool) {
  parallel(pool, static_cast<int64_t>(plan.sizes.size()), [&](int64_t tensor) {
    std::vector<float> found =
        widen(plan.arrays[2 * tensor], plan.types[tensor], plan.sizes[tensor]);
    found.resize(packed_room(plan.sizes[tensor]));
    narrow(found, plan.type, plan.arrays[2 * tensor + 1]);
  });
}

}  // namespace jaxunet::cpu
