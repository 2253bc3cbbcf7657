// Replaces, for emulate.cc, what the kernels use of CUDA and PTX. The threads of a cluster are
// fibers on one host thread. A fiber that waits for others yields to the scheduler in run().
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
using std::max;
using std::min;
namespace emu {
struct Block {
  std::vector<char> smem;
  int64_t smem_bytes;
  char statics[64];  // static shared memory
  int arrived = 0, generation = 0;
  uint3 index;
};
struct Warp {
  float value[2][32];  // two buffers: a lane may start the next shuffle before others have read
  int arrived = 0, generation = 0;
};
struct Thread {
  ucontext_t context;
  Block* block;
  Warp* warp;
  uint3 index;
  int lane;
  bool done = false;
  std::vector<char> stack;
};
extern Thread* now;
extern ucontext_t scheduler;
extern dim3 block_dim;
extern std::vector<Block>* blocks;
extern int cluster_arrived, cluster_generation;
inline void yield() { swapcontext(&now->context, &scheduler); }
inline void fail(const char* what) {
  printf("EMULATION: %s\n", what);
  exit(1);
}
inline void aligned(const void* p, int n) {
  if (reinterpret_cast<uintptr_t>(p) % n) fail("misaligned");
}
inline void* shared_static() { return now->block->statics; }
inline char* smem() {
  auto p = reinterpret_cast<uintptr_t>(now->block->smem.data());
  return reinterpret_cast<char*>((p + 15) / 16 * 16);
}
// The address in block `rank` of the cluster that corresponds to `here` in this block (mapa).
template <class T>
T* of_rank(T* here, int rank) {
  Block& peer = (*blocks)[rank];
  auto base = [](Block& b) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(b.smem.data()) + 15) / 16 * 16);
  };
  char* h = (char*)here;
  char* own = base(*now->block);
  if (h >= own && h < own + now->block->smem_bytes) return (T*)(base(peer) + (h - own));
  return (T*)(peer.statics + (h - now->block->statics));
}
void run(const std::function<void()>& kernel, dim3 grid, int threads, int64_t smem_bytes,
         bool clusters);
}  // namespace emu
#define threadIdx (emu::now->index)
#define blockIdx (emu::now->block->index)
#define blockDim (emu::block_dim)
template <class T>
T __ldg(const T* p) {
  emu::aligned(p, sizeof(T));
  return *p;
}
inline void __syncthreads() {
  auto* b = emu::now->block;
  int g = b->generation;
  if (++b->arrived == (int)blockDim.x) {
    b->arrived = 0;
    ++b->generation;
  } else
    while (b->generation == g) emu::yield();
}
inline float __shfl_xor_sync(unsigned, float x, int step) {
  auto* w = emu::now->warp;
  int g = w->generation;
  w->value[g & 1][emu::now->lane] = x;
  if (++w->arrived == 32) {
    w->arrived = 0;
    ++w->generation;
  } else
    while (w->generation == g) emu::yield();
  return w->value[g & 1][emu::now->lane ^ step];
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __uint_as_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  return x;
}
namespace jaxunet::cuda {
inline char* dynamic_smem() { return emu::smem(); }
// Copies take place at once (make.py).
inline void cp_async_commit() {}
template <int k>
void cp_async_wait() {}
inline void store_16(void* to, const void* from) {
  emu::aligned(to, 16);
  memcpy(to, from, 16);
}
// Supports one cluster barrier per launch, which is all that the kernels use.
inline void cluster_arrive_relaxed() {
  if (++emu::cluster_arrived == (int)(emu::blocks->size() * blockDim.x)) {
    emu::cluster_arrived = 0;
    ++emu::cluster_generation;
  }
}
inline void cluster_wait() {
  while (emu::cluster_generation == 0) emu::yield();
}
// An mbarrier with a count of pending bytes. `magic` shows that it has been initialized.
struct Barrier {
  int64_t count, pending, tx, phase, magic;
  void init(int n) {
    count = pending = n;
    tx = phase = 0;
    magic = 12345;
  }
  void advance() {
    if (pending == 0 && tx == 0) {
      ++phase;
      pending = count;
    }
  }
  void arrive_expect(int bytes) {
    tx += bytes;
    --pending;
    advance();
  }
  void complete(int bytes) {
    if (magic != 12345) emu::fail("send before init");
    tx -= bytes;
    advance();
  }
  void wait(int parity) {
    while ((phase & 1) == parity) emu::yield();
  }
};
inline void fence_barrier_init() {}
template <class Plan>
cudaError_t launch_row_clusters(void (*kernel)(Plan), dim3 grid, int threads, int64_t smem_bytes,
                                cudaStream_t, const Plan& plan) {
  if (threads % 32 || threads > 512 || smem_bytes > 227 * 1024 || grid.y > 65535 || grid.z > 65535)
    emu::fail("launch limits");
  emu::run([&] { kernel(plan); }, grid, threads, smem_bytes, true);
  return cudaSuccess;
}
}  // namespace jaxunet::cuda
