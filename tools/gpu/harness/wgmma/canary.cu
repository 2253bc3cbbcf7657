// Checks that wgmma reads the right rows of matrices that start at any row of a swizzled atom, with
// a base offset of 0 in the descriptor (common/wgmma.cuh). The convolution's Hopper kernels rely on
// this, because a tap's pixels begin at any row of a strip. PTX guarantees it only for matrices
// that start at a whole atom of eight rows, or whose start row is the base offset. A new driver,
// toolkit or GPU could read other rows. tests/gpu/test_gpu.py runs this check.
//
//   cd tools/gpu/harness/wgmma; ffi=../../../../xla_ffi
//   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a -I $ffi -o /tmp/canary canary.cu
//     $ffi/common/shared_memory.cc      (one command)
//   /tmp/canary
//
// Multiplies D (64 × 64) = A · B over 64 steps of K, for every combination of type, layouts and
// start rows, and two distances between the atoms. Operands are small whole numbers, so results are
// exact. Prints a line for each wrong product and their number, or nothing if all are right. The
// exit status is the number of wrong products, at most 200, or 255 after a CUDA error.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"

using namespace jaxunet::cuda;

namespace {

constexpr int kSize = 64, kRowBytes = 128, kRows = 128;  // kRows: room for a matrix

// Where a matrix lies in shared memory: its row r is row start + r / 8 · group + r % 8 there, so
// `group` rows separate the starts of two atoms.
struct Place {
  int start, group;
  __device__ int row(int r) const { return start + r / 8 * group + r % 8; }
};

// Writes a matrix of 64 × 64 with the 128-byte swizzle. A row of 128 bytes holds all steps of K of
// one row of A (column of B), or, with kMnMajor, all rows of A (columns of B) at one step of K. In
// `from`, the steps of K of each row of A (column of B) are contiguous.
template <class T, bool kMnMajor>
__device__ void store(unsigned char* to, const T* from, const Place& place) {
  for (int i = threadIdx.x; i < kSize * kSize; i += blockDim.x) {
    const int outer = i / kSize, k = i % kSize;
    const int row = place.row(kMnMajor ? k : outer), byte = 2 * (kMnMajor ? outer : k);
    *reinterpret_cast<T*>(to + row * kRowBytes + (byte ^ ((row % 8) << 4))) = from[i];
  }
}

template <class T, bool kMnMajorA, bool kMnMajorB>
__global__ void __launch_bounds__(128)
    multiply(const T* a, const T* b, Place at_a, Place at_b, float* d) {
#ifdef JAXUNET_SM90A_PASS
  unsigned char* const memory = shared_memory();
  store<T, kMnMajorA>(memory, a, at_a);
  store<T, kMnMajorB>(memory + kRows * kRowBytes, b, at_b);
  fence_async_proxy();
  __syncthreads();
  const uint32_t base = shared_address(memory);
  const uint64_t left = smem_descriptor(base + at_a.start * kRowBytes, at_a.group * kRowBytes),
                 right = smem_descriptor(base + (kRows + at_b.start) * kRowBytes,
                                         at_b.group * kRowBytes);
  float accumulator[32];
  for (float& value : accumulator) value = 0;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSize / 16; ++k) {
    const int step_a = kMnMajorA ? 2 * at_a.group * kRowBytes * k : 32 * k,
              step_b = kMnMajorB ? 2 * at_b.group * kRowBytes * k : 32 * k;
    Wgmma<T, kMnMajorA, kMnMajorB, kSize>::run(accumulator, advance(left, step_a),
                                               advance(right, step_b), true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_accumulator(accumulator);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 32; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[row * kSize + column] = accumulator[i];
  }
#else
  __trap();
#endif
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(255);
}

// Returns the number of wrong products with this pair of layouts.
template <class T, bool kMnMajorA, bool kMnMajorB>
int wrong(const T* a, const T* b, float* d, const std::vector<float>& wanted) {
  constexpr int kBytes = 2 * kRows * kRowBytes;
  const auto kernel = multiply<T, kMnMajorA, kMnMajorB>;
  check(allow_shared_memory(kernel, kBytes));
  int count = 0;
  for (int start = 0; start < 64; ++start) {
    for (const int group : {8, 10}) {  // of contiguous atoms; of a strip of pixels with its halo
      const Place at_a{start % 8, group}, at_b{start / 8, 18 - group};
      check(launch(kernel, dim3(1), 128, kBytes, nullptr, a, b, at_a, at_b, d));
      std::vector<float> found(kSize * kSize);
      check(cudaMemcpy(found.data(), d, found.size() * sizeof(float), cudaMemcpyDeviceToHost));
      if (found == wanted) continue;
      ++count;
      std::printf(
          "A %s-major from row %d, atoms %d apart; B %s-major from row %d, atoms %d apart\n",
          kMnMajorA ? "M" : "K", at_a.start, at_a.group, kMnMajorB ? "N" : "K", at_b.start,
          at_b.group);
    }
  }
  return count;
}

template <class T>
int wrong() {
  std::vector<T> a(kSize * kSize), b(a.size());
  std::vector<float> wide_a(a.size()), wide_b(a.size()), wanted(a.size());
  std::srand(1);
  for (size_t i = 0; i < a.size(); ++i) {
    wide_a[i] = static_cast<float>(std::rand() % 9 - 4);
    wide_b[i] = static_cast<float>(std::rand() % 9 - 4);
    a[i] = T(wide_a[i]);
    b[i] = T(wide_b[i]);
  }
  for (int i = 0; i < kSize * kSize; ++i) {
    for (int k = 0; k < kSize; ++k)
      wanted[i] += wide_a[i / kSize * kSize + k] * wide_b[i % kSize * kSize + k];
  }
  T *left = nullptr, *right = nullptr;
  float* d = nullptr;
  check(cudaMalloc(&left, a.size() * sizeof(T)));
  check(cudaMalloc(&right, b.size() * sizeof(T)));
  check(cudaMalloc(&d, wanted.size() * sizeof(float)));
  check(cudaMemcpy(left, a.data(), a.size() * sizeof(T), cudaMemcpyHostToDevice));
  check(cudaMemcpy(right, b.data(), b.size() * sizeof(T), cudaMemcpyHostToDevice));
  return wrong<T, false, false>(left, right, d, wanted) +
         wrong<T, false, true>(left, right, d, wanted) +
         wrong<T, true, false>(left, right, d, wanted) +
         wrong<T, true, true>(left, right, d, wanted);
}

}  // namespace

int main() {
  const int count = wrong<__nv_bfloat16>() + wrong<__half>();
  if (count) std::printf("%d of 1024 products are wrong\n", count);
  return count > 200 ? 200 : count;
}
