// Attention on the CPU: plain loops with float64 sums, for tests and for machines without a GPU.
// One task per head; plan.h and flash_backward.cuh have the formulas.
#include "binding/cpu.h"

#include <algorithm>

namespace jaxunet::cpu {
namespace {

// The rows of one head: head(token) is [width].
template <class T>
struct Head {
  T* data;
  int64_t stride;
  T* operator()(int64_t token) const { return data + token * stride; }
};

// A head of q, k or v in the packed array.
template <class Plan, class T>
Head<T> packed(const Plan& plan, std::vector<T>& qkv, int64_t sample, int64_t head, Qkv which) {
  const int64_t channels = plan.heads * plan.width;
  return {qkv.data() + sample * plan.tokens * 3 * channels + which * channels + head * plan.width,
          3 * channels};
}

// A head of out or of its gradient.
template <class Plan>
Head<float> unpacked(const Plan& plan, std::vector<float>& x, int64_t sample, int64_t head) {
  const int64_t channels = plan.heads * plan.width;
  return {x.data() + sample * plan.tokens * channels + head * plan.width, channels};
}

double dot(const float* a, const float* b, int64_t width) {
  double total = 0;
  for (int64_t d = 0; d < width; ++d) total += static_cast<double>(a[d]) * b[d];
  return total;
}

}  // namespace

void attention_forward(const AttentionForward& plan, Pool& pool) {
  const int64_t tokens = plan.tokens, width = plan.width,
                elements = plan.batch * tokens * plan.heads * width;
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  auto qkv = widen(plan.qkv, plan.type, 3 * elements);
  std::vector<float> out(elements);
  parallel(pool, plan.batch * plan.heads, [&](int64_t i) {
    const int64_t sample = i / plan.heads, head = i % plan.heads;
    const auto q = packed(plan, qkv, sample, head, kQ), k = packed(plan, qkv, sample, head, kK),
               v = packed(plan, qkv, sample, head, kV), o = unpacked(plan, out, sample, head);
    std::vector<double> weights(tokens), sums(width);
    for (int64_t row = 0; row < tokens; ++row) {
      for (int64_t t = 0; t < tokens; ++t) weights[t] = dot(q(row), k(t), width) * scale;
      const double max = *std::max_element(weights.begin(), weights.end());
      double total = 0;
      std::fill(sums.begin(), sums.end(), 0);
      for (int64_t t = 0; t < tokens; ++t) {
        const double weight = std::exp(weights[t] - max);
        total += weight;
        for (int64_t d = 0; d < width; ++d) sums[d] += weight * v(t)[d];
      }
      for (int64_t d = 0; d < width; ++d) o(row)[d] = static_cast<float>(sums[d] / total);
      plan.lse[i * tokens + row] = static_cast<float>(max + std::log(total));
    }
  });
  narrow(out, plan.type, plan.out);
}

void attention_backward(const AttentionBackward& plan, Pool& pool) {
  const int64_t tokens = plan.tokens, width = plan.width,
                elements = plan.batch * tokens * plan.heads * width;
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  auto qkv = widen(plan.qkv, plan.type, 3 * elements);
  auto out = widen(plan.out, plan.type, elements), grad = widen(plan.grad, plan.type, elements);
  std::vector<double> dqkv(3 * elements);
  parallel(pool, plan.batch * plan.heads, [&](int64_t i) {
    const int64_t sample = i / plan.heads, head = i % plan.heads;
    const auto q = packed(plan, qkv, sample, head, kQ), k = packed(plan, qkv, sample, head, kK),
               v = packed(plan, qkv, sample, head, kV), o = unpacked(plan, out, sample, head),
               g = unpacked(plan, grad, sample, head);
    const auto dq = packed(plan, dqkv, sample, head, kQ), dk = packed(plan, dqkv, sample, head, kK),
               dv = packed(plan, dqkv, sample, head, kV);
    for (int64_t row = 0; row < tokens; ++row) {
      const double delta = dot(o(row), g(row), width);  // sum over t of weight * dweight
      for (int64_t t = 0; t < tokens; ++t) {
        const double weight =
            std::exp(dot(q(row), k(t), width) * scale - plan.lse[i * tokens + row]);
        const double dlogit = weight * (dot(g(row), v(t), width) - delta) * scale;
        for (int64_t d = 0; d < width; ++d) {
          dq(row)[d] += dlogit * k(t)[d];
          dk(t)[d] += dlogit * q(row)[d];
          dv(t)[d] += weight * g(row)[d];
        }
      }
    }
  });
  narrow({dqkv.begin(), dqkv.end()}, plan.type, plan.dqkv);
}

}  // namespace jaxunet::cpu
