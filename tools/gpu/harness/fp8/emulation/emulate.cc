// Runs kernel.cuh on the CPU, thread by thread (instructions.cuh), and compares every output with a
// direct convolution of whole numbers, whose sums are exact.
//
//   tools/gpu/harness/fp8/emulation/run.sh     builds and runs it
//
// A line per variant. The exit status is 1 if an output is wrong, a thread breaks a rule or waits
// forever.
#include "kernel.cuh"
#include "variants.h"

using namespace jaxunet::cuda;
using namespace jaxunet::cuda::fp8;

namespace {

struct Problem {
  int batch, size, blocks;
};
constexpr Problem kProblems[] = {{1, 20, 2}, {2, 8, 3}, {1, 16, 1}};

CUtensorMap map_of(void* data, const int (&size)[4], const int (&box)[4]) {
  emulation::Map map{static_cast<unsigned char*>(data)};
  for (int i = 0; i < 4; ++i) {
    map.size[i] = size[i];
    map.box[i] = box[i];
  }
  CUtensorMap result;
  memcpy(&result, &map, sizeof map);
  return result;
}

// The e4m3 of a whole number from -3 to 3.
unsigned char e4m3_of(int number) {
  constexpr unsigned char kSizes[] = {0, 0x38, 0x40, 0x44};
  return kSizes[abs(number)] | (number < 0 ? 128 : 0);
}

struct Arrays {
  std::vector<unsigned char> x, weights;
  std::vector<__nv_bfloat16> y;
  std::vector<float> bias = std::vector<float>(kChannels);
  float scale = 0.5f;

  explicit Arrays(const Problem& of)
      : x(size_t(of.batch) * of.size * of.size * kChannels), weights(kWeightBytes), y(x.size()) {
    std::mt19937 random(3);
    for (auto& value : x) value = e4m3_of(int(random() % 7) - 3);
    for (auto& value : weights) value = e4m3_of(int(random() % 7) - 3);
    for (auto& value : bias) value = int(random() % 64) - 32;
    memset(y.data(), 0xff, 2 * y.size());
  }
};

int64_t wrong_outputs(const Problem& of, const Arrays& arrays) {
  int64_t wrong = 0;
  for (size_t i = 0; i < arrays.y.size(); ++i) {
    const int feature = i % kChannels, column = i / kChannels % of.size,
              row = i / kChannels / of.size % of.size, sample = i / kChannels / of.size / of.size;
    float sum = 0;
    for (int tap = 0; tap < kTaps; ++tap) {
      const int r = row + tap / 3 - 1, c = column + tap % 3 - 1;
      if (r < 0 || r >= of.size || c < 0 || c >= of.size) continue;
      const auto* x = &arrays.x[((size_t(sample) * of.size + r) * of.size + c) * kChannels];
      const auto* w = &arrays.weights[(tap * kChannels + feature) * kChannels];
      for (int k = 0; k < kChannels; ++k) sum += emulation::number(x[k]) * emulation::number(w[k]);
    }
    const float wanted =
                    __bfloat162float(__float2bfloat16(sum * arrays.scale + arrays.bias[feature])),
                found = __bfloat162float(arrays.y[i]);
    if (found == wanted) continue;
    if (++wrong <= 3)
      printf("BAD sample %d row %d column %d feature %d: %g, expected %g\n", sample, row, column,
             feature, found, wanted);
  }
  return wrong;
}

template <class V>
int64_t check() {
  int64_t wrong = 0;
  for (const Problem& of : kProblems) {
    Arrays arrays(of);
    Parameters p;
    p.x = map_of(arrays.x.data(), {kChannels / 2, of.size, of.size, of.batch},
                 {64, kHaloColumns, V::kRows + 2, 1});
    p.weights =
        map_of(arrays.weights.data(), {kChannels / 2, kChannels, kTaps, 1}, {64, kChannels, 1, 1});
    p.y = map_of(arrays.y.data(), {kChannels, of.size, of.size, of.batch}, {64, kColumns, 8, 1});
    p.scale = &arrays.scale;
    p.bias = arrays.bias.data();
    set_strips(V::kRows, of.batch, of.size, &p);
    emulation::run([&] { fp8_forward<V>(p); }, of.blocks, kThreads, V::kSharedBytes);
    wrong += wrong_outputs(of, arrays);
  }
  return wrong;
}

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int64_t wrong = 0;
  each_variant([&](auto variant, const char* name) {
    const int64_t found = check<decltype(variant)>();
    printf("%-44s %ld wrong\n", name, long(found));
    wrong += found;
  });
  return wrong > 0;
}
