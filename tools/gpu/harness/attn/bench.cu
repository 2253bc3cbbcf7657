// Checks the Hopper attention kernels, as attention/hopper/shapes.cuh dispatches to them, against
// float64, and times them and the flash kernels (attention/flash_*), which take the same calls on
// other GPUs. Needs a GPU of compute capability 9.0.
//
//   tools/gpu/harness/attn/build.sh FOLDER
//   FOLDER/run.sh            all families, one process each, so that a crash ends only one
//   FOLDER/bench FAMILY      channels of a head: 32 (elephants64), 64 (imagenet64), 256 (cifar10)
//
// A line per check: `ok` or `BAD`, the call, then relative and largest error of the Hopper kernels
// and, in parentheses, of the flash kernels. BITS DIFFER: two runs gave different results. NOT
// TAKEN: the Hopper dispatch does not accept the shape. For the forward pass, both errors are those
// of its output; the log-sum-exp is checked, too.
//
// A line per timing, in bfloat16: the call as tokens x heads x channels, batch, `cold` or `hot`,
// the median time of a flash call and of a Hopper call with [fastest slowest], their ratio, and the
// Hopper kernels' TFLOP/s and GB/s.
//
// The exit status is 1 if a check is BAD or a CUDA call failed, 2 for an unknown family. After 30 s
// SIGALRM ends the program.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/flash.h"
#include "attention/hopper/launch.cuh"
#include "attention/hopper/launch.h"
#include "reference.cuh"

using namespace jaxunet;
using namespace jaxunet::cuda;

constexpr Type kBf16 = Type::kBfloat16, kF16 = Type::kFloat16;
constexpr const char* kPasses[] = {"forward", "backward"};
constexpr int kRounds = 7, kWarmup = 2;     // launches of a graph that count, and before them
constexpr size_t kColdBytes = 240'000'000;  // inputs to rotate over: more than the L2 (50 MB)

int multiprocessors, shared_bytes, bad = 0;
uint64_t seed;

struct Shape {
  int tokens, heads, width;
};

// The arrays of one call, with random inputs. T: __nv_bfloat16 or __half.
template <class T>
struct Arrays {
  T *qkv, *out, *grad, *dqkv;
  float* lse;
  size_t count, rows;  // elements of out, elements of lse

  Arrays(int batch, Shape s, uint64_t of)
      : count(size_t(batch) * s.tokens * s.heads * s.width),
        rows(size_t(batch) * s.tokens * s.heads) {
    CHECK(cudaMalloc(&qkv, 6 * count));
    CHECK(cudaMalloc(&dqkv, 6 * count));
    CHECK(cudaMalloc(&out, 2 * count));
    CHECK(cudaMalloc(&grad, 2 * count));
    CHECK(cudaMalloc(&lse, 4 * rows));
    fill_normal<<<528, 256>>>(qkv, 3 * count, of, 0.0f, 1.0f);
    fill_normal<<<528, 256>>>(grad, count, of + 7, 0.0f, 1.0f);
    CHECK(cudaGetLastError());
  }
  Arrays(const Arrays&) = delete;
  ~Arrays() {
    for (void* array : {(void*)qkv, (void*)dqkv, (void*)out, (void*)grad, (void*)lse})
      CHECK(cudaFree(array));
  }
  void poison() {  // fills the outputs with NaN
    CHECK(cudaMemset(out, 0xff, 2 * count));
    CHECK(cudaMemset(lse, 0xff, 4 * rows));
    CHECK(cudaMemset(dqkv, 0xff, 6 * count));
  }
};

// Runs a pass (0: forward, 1: backward) with the Hopper or the flash kernels. Returns false if they
// do not accept the shape.
template <Type type, class T>
bool run(bool hopper, int pass, int batch, Shape s, Arrays<T>& x, cudaStream_t stream = 0) {
  const AttentionForward f{type, batch, s.tokens, s.heads, s.width, x.qkv, x.out, x.lse};
  const AttentionBackward b{type,  batch, s.tokens, s.heads, s.width,
                            x.qkv, x.out, x.grad,   x.lse,   x.dqkv};
  std::optional<cudaError_t> error;
  if (hopper) {
    error = pass ? hopper_attention_backward<type>(b, multiprocessors, stream)
                 : hopper_attention_forward<type>(f, multiprocessors, stream);
  } else {
    error = pass ? flash_backward<type>(b, shared_bytes, stream)
                 : flash_forward<type>(f, shared_bytes, stream);
  }
  if (error) CHECK(*error);
  return error.has_value();
}

// Attention and its gradients in float64.
template <class T>
struct Exact {
  double *weights, *ds, *out, *lse, *dqkv;

  Exact(const Arrays<T>& x, Shape s) {
    const size_t pairs = x.rows * s.tokens;
    CHECK(cudaMalloc(&weights, 8 * pairs));
    CHECK(cudaMalloc(&ds, 8 * pairs));
    CHECK(cudaMalloc(&out, 8 * x.count));
    CHECK(cudaMalloc(&lse, 8 * x.rows));
    CHECK(cudaMalloc(&dqkv, 24 * x.count));
    const int n = s.tokens, h = s.heads, d = s.width;
    ref_fwd<<<x.rows, 128, n * 8>>>(x.qkv, n, h, d, weights, out, lse);
    ref_ds<<<x.rows, 128>>>(x.qkv, x.grad, n, h, d, weights, out, ds);
    ref_bwd<<<x.rows, 128>>>(x.qkv, x.grad, n, h, d, weights, ds, dqkv);
    CHECK(cudaDeviceSynchronize());
  }
  Exact(const Exact&) = delete;
  ~Exact() {
    for (double* array : {weights, ds, out, lse, dqkv}) CHECK(cudaFree(array));
  }
};

template <class T>
std::vector<char> bytes(const T* data, size_t count) {
  std::vector<char> host(count * sizeof(T));
  CHECK(cudaMemcpy(host.data(), data, host.size(), cudaMemcpyDeviceToHost));
  return host;
}

// Compares the errors of the Hopper kernels with those of the flash kernels, and two runs of the
// Hopper kernels bit by bit. The backward pass gets the forward results of the flash kernels.
template <Type type, class T>
void check(Shape s, int batch, std::vector<int> passes) {
  Arrays<T> x(batch, s, seed + s.tokens + 3 * s.width + batch);
  const Exact<T> exact(x, s);
  const auto errors = [&](int pass) {
    return pass ? std::vector<Error>{error_of(x.dqkv, exact.dqkv, 3 * x.count)}
                : std::vector<Error>{error_of(x.out, exact.out, x.count),
                                     error_of(x.lse, exact.lse, x.rows)};
  };
  for (int pass : passes) {
    x.poison();
    if (pass) run<type>(false, 0, batch, s, x);
    run<type>(false, pass, batch, s, x);
    const std::vector<Error> old = errors(pass);
    std::vector<char> found[2];
    std::vector<Error> now;
    bool taken = true;
    for (auto& bits : found) {
      x.poison();
      if (pass) run<type>(false, 0, batch, s, x);
      taken = run<type>(true, pass, batch, s, x);
      CHECK(cudaDeviceSynchronize());
      now = errors(pass);
      bits = pass ? bytes(x.dqkv, 3 * x.count) : bytes(x.out, x.count);
    }
    const bool same = found[0] == found[1];
    bool ok = taken && same && now[0].rel < 1.1 * old[0].rel && now[0].max < 2 * old[0].max;
    if (!pass) ok = ok && now[1].max < 1e-5 + 2 * old[1].max;
    bad += !ok;
    printf("%s %s B%d %dx%dx%d %s: rel %.2e (flash %.2e) max %.1e (%.1e)%s%s\n", ok ? "ok " : "BAD",
           type == kBf16 ? "bf16" : "f16", batch, s.tokens, s.heads, s.width, kPasses[pass],
           now[0].rel, old[0].rel, now[0].max, old[0].max, same ? "" : " BITS DIFFER",
           taken ? "" : " NOT TAKEN");
    fflush(stdout);
  }
}

// The calls of a graph that rotate over `sets` sets of arrays.
int calls_of(int sets) { return std::max(12, sets); }

// Captures these calls. The first call, outside of the graph, loads the kernels.
cudaGraphExec_t record(int sets, const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  call(0, stream);
  CHECK(cudaStreamSynchronize(stream));
  const cudaGraphExec_t graph = graph_of(stream, calls_of(sets), [&](int i) {
    call(i % sets, stream);
    return cudaSuccess;
  });
  CHECK(cudaStreamDestroy(stream));
  return graph;
}

// The microseconds per call of each graph, sorted; destroys the graphs.
std::vector<std::vector<float>> times_of(const std::vector<cudaGraphExec_t>& graphs, int sets) {
  const auto times = times_in_turns(0, graphs, calls_of(sets), kWarmup, kRounds);
  for (auto graph : graphs) CHECK(cudaGraphExecDestroy(graph));
  return times;
}

// Prints the times of both kernels in bfloat16. `hot`: one set of inputs, which may stay in the L2.
void time_passes(Shape s, int batch, bool hot, std::vector<int> passes) {
  const size_t count = size_t(batch) * s.tokens * s.heads * s.width;
  const int sets = hot ? 1 : std::min<size_t>(16, kColdBytes / (16 * count) + 2);
  std::vector<std::unique_ptr<Arrays<__nv_bfloat16>>> arrays;
  for (int i = 0; i < sets; ++i) {
    arrays.push_back(std::make_unique<Arrays<__nv_bfloat16>>(batch, s, seed + i));
    run<kBf16>(false, 0, batch, s, *arrays.back());
  }
  std::vector<cudaGraphExec_t> graphs;
  for (int pass : passes) {
    for (bool hopper : {false, true}) {
      graphs.push_back(record(sets, [&, pass, hopper](int i, cudaStream_t stream) {
        run<kBf16>(hopper, pass, batch, s, *arrays[i], stream);
      }));
    }
  }
  const auto times = times_of(graphs, sets);
  for (size_t i = 0; i < passes.size(); ++i) {
    const auto &old = times[2 * i], &now = times[2 * i + 1];
    const float was = old[old.size() / 2], is = now[now.size() / 2];
    const double flops = (passes[i] ? 10.0 : 4.0) * count * s.tokens;
    printf(
        "%4dx%dx%-3d B%-3d %s %-8s flash %7.2f us, hopper %7.2f [%.2f %.2f] x%.2f %4.0f TFLOP/s "
        "%4.0f GB/s\n",
        s.tokens, s.heads, s.width, batch, hot ? "hot " : "cold", kPasses[passes[i]], was, is,
        now.front(), now.back(), was / is, flops / is * 1e-6,
        (passes[i] ? 16.0 : 8.0) * count / is * 1e-3);
  }
  fflush(stdout);
}

// Compares the two ways to compute the backward pass of heads of 256 tokens and 256 channels: the
// one launch that shapes.cuh dispatches to (backward_cluster.cuh), and the three launches that
// longer heads take (streaming.cuh). Prints times and largest errors of both; the errors do not
// affect the exit status.
template <Type type, class T>
void compare_launches(int batch) {
  const Shape s{256, 1, 256};
  const size_t count = size_t(batch) * s.tokens * s.heads * s.width;
  const auto three = [&](Arrays<T>& x, cudaStream_t stream) {
    CHECK((hopper_attention::run_streaming_backward<T, 256>(
        {type, batch, s.tokens, s.heads, s.width, x.qkv, x.out, x.grad, x.lse, x.dqkv},
        multiprocessors, stream)));
  };
  const int sets = std::min<size_t>(16, kColdBytes / (16 * count) + 2);
  std::vector<std::unique_ptr<Arrays<T>>> arrays;
  for (int i = 0; i < sets; ++i) {
    arrays.push_back(std::make_unique<Arrays<T>>(batch, s, seed + i));
    run<type>(false, 0, batch, s, *arrays.back());
  }
  Arrays<T>& first = *arrays[0];
  double max[2];
  {
    const Exact<T> exact(first, s);
    for (bool one : {false, true}) {
      CHECK(cudaMemset(first.dqkv, 0xff, 6 * count));
      if (one) {
        run<type>(true, 1, batch, s, first);
      } else {
        three(first, 0);
      }
      max[one] = error_of(first.dqkv, exact.dqkv, 3 * count).max;
    }
  }
  const auto three_launches = [&](int i, cudaStream_t stream) { three(*arrays[i], stream); };
  const auto one_launch = [&](int i, cudaStream_t stream) {
    run<type>(true, 1, batch, s, *arrays[i], stream);
  };
  const auto found = times_of({record(sets, three_launches), record(sets, one_launch)}, sets);
  printf("%s 256x1x256 B%d backward:", type == kBf16 ? "bf16" : "f16", batch);
  for (int i = 0; i < 2; ++i) {
    const auto& times = found[i];
    const float time = times[times.size() / 2];
    printf(" %s %.2f us [%.2f %.2f] %.0f TFLOP/s, max error %.1e;",
           i ? "one launch" : "three launches", time, times.front(), times.back(),
           10.0 * count * s.tokens / time * 1e-6, max[i]);
  }
  printf("\n");
  fflush(stdout);
}

void run_family(const std::string& family) {
  const std::vector<int> forward = {0}, both = {0, 1};
  using B = __nv_bfloat16;
  if (family == "32") {  // elephants64
    for (int batch : {3, 47}) check<kBf16, B>({256, 6, 32}, batch, both);
    for (int batch : {1, 133}) check<kBf16, B>({64, 3, 32}, batch, forward);
    check<kBf16, B>({256, 1, 32}, 1, both);
    check<kF16, __half>({256, 6, 32}, 3, both);
    check<kF16, __half>({64, 8, 32}, 5, forward);
    for (auto [batch, hot] : {std::pair(256, false), {32, false}, {32, true}}) {
      time_passes({256, 6, 32}, batch, hot, both);
      time_passes({64, 8, 32}, batch, hot, forward);
    }
  } else if (family == "256") {  // cifar10
    for (int batch : {3, 133}) check<kBf16, B>({256, 1, 256}, batch, both);
    check<kBf16, B>({256, 2, 256}, 3, both);
    check<kF16, __half>({256, 1, 256}, 128, both);
    check<kF16, __half>({256, 3, 256}, 2, both);
    check<kF16, __half>({128, 2, 256}, 5, both);
    check<kBf16, B>({128, 1, 256}, 3, both);
    check<kBf16, B>({384, 1, 256}, 2, forward);
    for (int batch : {128, 32}) time_passes({256, 1, 256}, batch, false, both);
    compare_launches<kBf16, B>(128);
    compare_launches<kF16, __half>(128);
  } else {  // imagenet64
    for (Shape s : {Shape{64, 12, 64}, {256, 9, 64}, {384, 3, 64}, {1024, 2, 64}}) {
      check<kBf16, B>(s, 3, both);
      check<kF16, __half>(s, 2, both);
    }
    check<kBf16, B>({64, 5, 64}, 133, both);
    check<kBf16, B>({64, 1, 64}, 1, both);
    check<kBf16, B>({4096, 1, 64}, 1, both);
    for (auto [s, batch] : {std::pair(Shape{1024, 6, 64}, 16),
                            {{256, 9, 64}, 64},
                            {{64, 12, 64}, 64},
                            {{64, 12, 64}, 16}})
      time_passes(s, batch, false, both);
  }
}

int main(int argc, char** argv) {
  const std::string family = argc == 2 ? argv[1] : "";
  if (family != "32" && family != "64" && family != "256") {
    printf("expected the channels of a head: 32, 64 or 256\n");
    return 2;
  }
  alarm(30);
  seed = time(nullptr);
  int device;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  CHECK(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  printf("== heads of %s channels, seed %llu\n", argv[1], static_cast<unsigned long long>(seed));
  run_family(family);
  printf("CHECKS: %d BAD\n", bad);
  return bad != 0;
}
