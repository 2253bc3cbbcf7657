// Replaces xla_ffi/group_norm/instructions.cuh for emulate.cc: CUDA's built-in functions and the
// kernels' PTX on the CPU, where each thread of the running cluster is a host thread. Prints BAD
// and aborts if a kernel breaks a rule.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#undef __grid_constant__
#define __grid_constant__
#undef __maxnreg__
#define __maxnreg__(x)
using std::max;
using std::min;
namespace emu {
struct Warp {
  std::barrier<> sync{32};
  float values[32];
};
struct Block {
  std::unique_ptr<std::barrier<>> sync;
  std::vector<Warp> warps;
  char* smem;
  size_t bytes;
  bool open = false;              // the block's mailbox (mailbox.cuh)
  std::atomic<int> received = 0;  // bytes that its mailbox has received
};
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::unique_ptr<std::barrier<>> sync;
};
struct Copy {
  void* to;
  const void* from;
};
struct Thread {
  Cluster* cluster;
  Block* block;
  int rank;
  std::vector<std::vector<Copy>> groups;  // committed copies, which no wait has performed
  std::vector<Copy> open;
};
inline thread_local Thread* self;
}  // namespace emu
inline thread_local dim3 threadIdx, blockIdx, blockDim;
inline void __syncthreads() { emu::self->block->sync->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float x, int step) {
  auto& w = emu::self->block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  w.values[lane] = x;
  w.sync.arrive_and_wait();
  const float got = w.values[lane ^ step];
  w.sync.arrive_and_wait();
  return got;
}
inline float __uint_as_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned atomicAdd(unsigned* p, unsigned x) {
  return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
namespace jaxunet::cuda {
inline char* dynamic_smem() { return emu::self->block->smem; }
inline void check_smem(const void* p, size_t n, const char* what) {
  const char* s = emu::self->block->smem;
  const char* q = static_cast<const char*>(p);
  if (q < s || q + n > s + emu::self->block->bytes || reinterpret_cast<uintptr_t>(p) % n) {
    printf("BAD %s smem offset %ld of %zu\n", what, long(q - s), emu::self->block->bytes);
    abort();
  }
}
// Copies take place in cp_async_wait, so that a read before it finds old data.
inline void cp_async_16(void* to, const void* from) {
  check_smem(to, 16, "cp.async");
  if (reinterpret_cast<uintptr_t>(from) % 16) {
    printf("BAD cp.async source\n");
    abort();
  }
  emu::self->open.push_back({to, from});
}
inline void cp_async_commit() {
  emu::self->groups.push_back(std::move(emu::self->open));
  emu::self->open.clear();
}
template <int kPending>
void cp_async_wait() {
  auto& g = emu::self->groups;
  const size_t n = g.size() > kPending ? g.size() - kPending : 0;
  for (size_t i = 0; i < n; ++i) {
    for (auto& c : g[i]) memcpy(c.to, c.from, 16);
    g[i].clear();
  }
}
// Reads a byte, so that an address outside of the array can be noticed.
inline void prefetch_l2(const void* p) {
  volatile char c = *static_cast<const char*>(p);
  (void)c;
}
inline thread_local std::unique_ptr<std::barrier<>::arrival_token> token;  // null: not arrived
inline void cluster_arrive() {
  if (token) {
    printf("BAD cluster arrive twice\n");
    abort();
  }
  token = std::make_unique<std::barrier<>::arrival_token>(emu::self->cluster->sync->arrive());
}
inline void cluster_wait() {
  if (!token) {
    printf("BAD cluster wait without arrive\n");
    abort();
  }
  emu::self->cluster->sync->wait(std::move(*token));
  token.reset();
}
// Runs one cluster after another. The blocks along x form a cluster.
template <class Plan>
cudaError_t launch_row_clusters(void (*kernel)(Plan), dim3 grid, int threads, int64_t smem_bytes,
                                cudaStream_t, const Plan& plan) {
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y) {
      emu::Cluster c;
      const int n = grid.x;
      c.sync = std::make_unique<std::barrier<>>(n * threads);
      for (int r = 0; r < n; ++r) {
        auto b = std::make_unique<emu::Block>();
        b->sync = std::make_unique<std::barrier<>>(threads);
        b->warps = std::vector<emu::Warp>(threads / 32);
        b->bytes = smem_bytes;
        b->smem = static_cast<char*>(aligned_alloc(128, (smem_bytes + 127) / 128 * 128));
        memset(b->smem, 0xff, smem_bytes);
        c.blocks.push_back(std::move(b));
      }
      std::vector<std::thread> all;
      for (int r = 0; r < n; ++r)
        for (int t = 0; t < threads; ++t)
          all.emplace_back([&, r, t] {
            emu::Thread me{&c, c.blocks[r].get(), r};
            emu::self = &me;
            threadIdx = dim3(t, 0, 0);
            threadIdx.y = threadIdx.z = 0;
            threadIdx.x = t;
            blockIdx.x = r;
            blockIdx.y = y;
            blockIdx.z = z;
            blockDim = dim3(threads);
            kernel(plan);
            if (token) {
              printf("BAD exit between cluster arrive and wait\n");
              abort();
            }
          });
      for (auto& t : all) t.join();
      for (auto& b : c.blocks) free(b->smem);
    }
  return cudaSuccess;
}
}  // namespace jaxunet::cuda
