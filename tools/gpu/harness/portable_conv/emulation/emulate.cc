// Runs the multistage kernels on the CPU, thread by thread, with every tile, and compares all
// results with float64 sums. common/ replaces the headers with CUDA and PTX. Any of these ends the
// program: accesses to shared memory that no barrier orders, bank conflicts, misaligned accesses,
// copies from outside of an array, and writes beyond an array or shared memory.
//
//   tools/gpu/harness/portable_conv/emulation/run.sh     builds and runs it
//   emulate          all small cases (cases.h)
//   emulate quick    every second case
//
// Prints BAD for each of the first wrong entries, or EMULATION and the reason why it ends, or a
// summary. The exit status is 1 if anything failed.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "cases.h"
#include "conv3x3/kernels.h"
#include "conv3x3/portable/multistage.h"
#include "threads.h"

namespace {

using namespace harness;
using jaxunet::cuda::kMultistageTileCount;

// The arrays of a plan. Inputs are random, and copies may read only their exact bytes
// (emulation::readable). Outputs begin as NaN, and are followed by NaN that must stay.
template <class T>
struct Arrays {
  static constexpr int64_t kBeyond = 64;
  std::vector<std::unique_ptr<char, decltype(&free)>> all;
  std::vector<std::pair<char*, char*>> beyond;
  std::mt19937& random;

  explicit Arrays(std::mt19937& random_) : random(random_) { emulation::readable.clear(); }

  void* operator()(int64_t count, Kind kind) {
    const bool input = kind == Kind::kInput || kind == Kind::kFloatInput;
    const int64_t size = kind == Kind::kInput || kind == Kind::kOutput ? 2 : 4;
    const int64_t bytes = count * size + (input ? 0 : kBeyond);
    auto* data = static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64 + 64));
    all.emplace_back(data, &free);
    memset(data, 0xff, bytes);
    if (!input) beyond.push_back({data + count * size, data + bytes});
    if (input && count > 0) emulation::readable.push_back({data, data + count * size});
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; input && i < count; ++i) {
      if (kind == Kind::kInput)
        reinterpret_cast<T*>(data)[i] = static_cast<T>(uniform(random));
      else
        reinterpret_cast<float*>(data)[i] = uniform(random);
    }
    return data;
  }
  bool intact() const {
    for (const auto& [first, last] : beyond) {
      for (const char* at = first; at < last; ++at) {
        if (*at != static_cast<char>(0xff)) return false;
      }
    }
    return true;
  }
};

double worst[2];  // largest error / allowed error: forward, weight gradient
int calls, bad;

void compare(double got, const Exact& result, double bound, int which, int64_t row,
             int64_t feature) {
  const double error = std::abs(got - result.sum);
  if (error <= bound) {
    if (error > worst[which] * bound) worst[which] = error / bound;
    return;
  }
  if (++bad <= 10)
    printf("BAD %s call %d row %ld feature %ld: %g, expected %g, allowed error %g\n",
           which ? "weight gradient" : "forward", calls, static_cast<long>(row),
           static_cast<long>(feature), got, result.sum, bound);
}

template <class T>
void check_forward(const Case& c, Type type, int tile, std::mt19937& random) {
  Arrays<T> arrays(random);
  const Conv3x3 plan = forward_plan(c, type, arrays);
  if (jaxunet::cuda::multistage_forward(plan, tile, nullptr) != cudaSuccess)
    emulation::fail("refused");
  const auto* y = static_cast<const T*>(plan.y.data[0]);
  for (int64_t i = 0; i < plan.batch * plan.height * plan.width * plan.features; ++i) {
    const int64_t pixel = i / plan.features, feature = i % plan.features;
    const Exact result = exact<T>(plan, pixel, feature);
    compare(number(y + i), result, allowed<T>(result, true), 0, pixel, feature);
  }
  if (!arrays.intact()) emulation::fail("a write beyond y");
}

template <class T>
void check_weight_gradient(const Case& c, Type type, int tile, int splits, std::mt19937& random) {
  Arrays<T> arrays(random);
  const auto plan = weight_gradient_plan(c, type, splits, arrays);
  if (jaxunet::cuda::multistage_weight_gradient(plan, tile, splits, plan.workspace,
                                                shortcut_partials(plan, splits), nullptr))
    emulation::fail("refused");
  const int64_t rows = 9 * plan.x.total + plan.projected.total;
  for (int64_t i = 0; i < rows * plan.features; ++i) {
    const int64_t row = i / plan.features, feature = i % plan.features;
    const Exact result = exact<T>(plan, row, feature);
    compare(partial_sum(plan, splits, row, feature), result, allowed<T>(result, false), 1, row,
            feature);
  }
  if (!arrays.intact()) emulation::fail("a write beyond the partial results");
}

}  // namespace

int main(int count, char**) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::mt19937 random(1);
  for (size_t i = 0; i < kSmall.size(); i += count > 1 ? 2 : 1) {
    for (int tile = 0; tile < kMultistageTileCount; ++tile, ++calls) {
      const Case& c = kSmall[i];
      emulation::early = calls % 2;
      const int splits = 1 + calls % 3;
      if (calls / 2 % 2) {
        check_forward<__half>(c, Type::kFloat16, tile, random);
        check_weight_gradient<__half>(c, Type::kFloat16, tile, splits, random);
      } else {
        check_forward<__nv_bfloat16>(c, Type::kBfloat16, tile, random);
        check_weight_gradient<__nv_bfloat16>(c, Type::kBfloat16, tile, splits, random);
      }
    }
  }
  printf(
      "%d calls of each kernel, %d bad entries; largest share of the allowed error: forward %.2f, "
      "weight gradient %.2f\n",
      calls, bad, worst[0], worst[1]);
  return bad > 0;
}
