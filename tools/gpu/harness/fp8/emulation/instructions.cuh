// Replaces ../instructions.cuh for emulate.cc: the threads of a block are fibers on one host
// thread, warps run in random order, and asynchronous instructions take effect as late or as
// disordered as the hardware may: wgmmas at their wait, TMA copies at random times in random order.
// The place of a load holds NaN from the start of the copy to its end. Descriptors are those of
// xla_ffi/common/wgmma.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#define JAXUNET_SM90A_PASS

namespace emulation {

[[noreturn]] inline void fail(const char* what) {
  printf("EMULATION: %s\n", what);
  exit(1);
}
inline void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

constexpr uint32_t kBase = 1024;  // the address where dynamic shared memory begins

// What a CUtensorMap describes here: 4 dimensions, innermost first; sizes of elements of 2 bytes.
struct Map {
  unsigned char* data;
  int size[4], box[4];
  int64_t stride(int dimension) const {
    int64_t bytes = 2;
    for (int i = 0; i < dimension; ++i) bytes *= size[i];
    return bytes;
  }
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

struct Product {
  float* accumulator;
  uint64_t a, b;
  bool add;
};
struct Warp {
  int arrived = 0, count = 0;
  uint32_t address[32], values[32][4];
};
struct Thread {
  ucontext_t context;
  uint3 index;
  Warp* warp;
  bool done;
  int stores;                                // that have not read their shared memory
  std::vector<Product> open;                 // not committed
  std::vector<std::vector<Product>> groups;  // committed
  std::unique_ptr<char[]> stack;
};
struct Counter {
  int arrived = 0, count = 0;
};

inline std::mt19937 engine(7);
inline Thread* self;
inline ucontext_t scheduler;
inline uint3 block_index, grid;
inline unsigned char* shared;  // aligned to 1024 bytes
inline int shared_bytes, threads;
inline Counter barriers[16];
inline std::vector<std::function<void()>> copies;  // that have begun

inline void yield() { swapcontext(&self->context, &scheduler); }

// The byte at an address of shared memory.
inline unsigned char& at(uint32_t address) {
  require(address >= kBase && address < kBase + shared_bytes, "outside of shared memory");
  return shared[address - kBase];
}
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void arrive_and_wait(Counter& counter, int of) {
  const int now = counter.count;
  if (++counter.arrived == of) {
    counter.arrived = 0;
    ++counter.count;
  }
  while (counter.count == now) yield();
}
template <class Execute>
void with_warp(const Execute& execute) {
  Warp& warp = *self->warp;
  const int now = warp.count;
  if (++warp.arrived < 32) {
    while (warp.count == now) yield();
    return;
  }
  execute(warp);
  warp.arrived = 0;
  ++warp.count;
}

// The number that an e4m3 stands for: 4 bits of exponent with bias 7, 3 of mantissa.
inline float number(unsigned char e4m3) {
  const int exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
  if ((e4m3 & 127) == 127) return __builtin_nanf("");
  const float size =
      exponent ? __builtin_ldexpf(8 + mantissa, exponent - 10) : __builtin_ldexpf(mantissa, -9);
  return e4m3 & 128 ? -size : size;
}

// Element `byte` of a row of the K-major matrix of a descriptor.
inline float element(uint64_t descriptor, int row, int byte) {
  require(descriptor >> 62 == 1, "a descriptor without the 128-byte swizzle");
  const uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  return number(at(swizzled(start + row / 8 * stride + row % 8 * 128 + byte)));
}

inline void execute(const Product& product) {
  const int thread = self->index.x % 128, warp = thread / 32, lane = thread % 32;
  float x[2][32];
  for (int i = 0; i < 64; ++i)
    x[i / 32][i % 32] = element(product.a, 16 * warp + lane / 4 + i / 32 * 8, i % 32);
  for (int i = 0; i < 64; ++i) {
    float sum = product.add ? product.accumulator[i] : 0;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) sum += x[i / 2 % 2][k] * element(product.b, column, k);
    product.accumulator[i] = sum;
  }
}

inline std::function<void()> kernel;
inline void begin() {
  kernel();
  require(self->groups.empty() && self->open.empty(), "a thread ends before its wgmmas");
  self->done = true;
  yield();
}

// Runs `body` as a kernel, block after block.
inline void run(const std::function<void()>& body, int blocks, int block_threads, int bytes) {
  kernel = body;
  threads = block_threads;
  shared_bytes = bytes;
  grid = {static_cast<unsigned>(blocks), 1, 1};
  std::vector<Thread> all(threads);
  std::vector<Warp> warps(threads / 32);
  for (auto& thread : all) thread.stack.reset(new char[256 * 1024]);
  shared = static_cast<unsigned char*>(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  for (int b = 0; b < blocks; ++b) {
    block_index = {static_cast<unsigned>(b), 0, 0};
    memset(shared, 0xff, bytes);
    for (int t = 0; t < threads; ++t) {
      Thread& thread = all[t];
      thread.index = {static_cast<unsigned>(t), 0, 0};
      thread.warp = &warps[t / 32];
      thread.done = false;
      thread.stores = 0;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = 256 * 1024;
      makecontext(&thread.context, begin, 0);
    }
    int left = threads;
    for (int idle = 0; left > 0;) {
      const int warp = engine() % warps.size(), before = left;
      for (int lane = 0; lane < 32; ++lane) {
        self = &all[32 * warp + lane];
        if (self->done) continue;
        swapcontext(&scheduler, &self->context);
        left -= self->done;
      }
      if (!copies.empty() && engine() % 4 == 0) {
        const size_t n = engine() % copies.size();
        copies[n]();
        copies.erase(copies.begin() + n);
        idle = 0;
      }
      idle = left < before ? 0 : idle + 1;
      require(idle < 300'000, "deadlock");
    }
    for (; !copies.empty(); copies.pop_back()) copies.back()();
  }
  free(shared);
}

}  // namespace emulation

#define threadIdx (emulation::self->index)
#define blockIdx (emulation::block_index)
#define gridDim (emulation::grid)
inline void __syncthreads() {
  emulation::arrive_and_wait(emulation::barriers[0], emulation::threads);
}
inline void __syncwarp() {
  emulation::with_warp([](emulation::Warp&) {});
}
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<const unsigned char*>(p) - emulation::shared + emulation::kBase;
}

// The real descriptors; what is asm there gets other names.
#define wgmma_fence asm_wgmma_fence
#define wgmma_commit asm_wgmma_commit
#define wgmma_wait asm_wgmma_wait
#define fence_accumulator asm_fence_accumulator
#define stmatrix_x4 asm_stmatrix_x4
#include "common/wgmma.cuh"
#undef wgmma_fence
#undef wgmma_commit
#undef wgmma_wait
#undef fence_accumulator
#undef stmatrix_x4

namespace jaxunet::cuda {

struct Barrier {
  int bytes;
  int8_t count, left, phase, valid;
  void init(int arrivals) { *this = {0, int8_t(arrivals), int8_t(arrivals), 0, 1}; }
  void complete() {
    emulation::require(valid == 1 && left >= 0 && bytes >= 0, "too many arrivals or bytes");
    if (left > 0 || bytes > 0) return;
    left = count;
    phase ^= 1;
  }
  void arrive() {
    --left;
    complete();
  }
  void arrive_expect(int announced) {
    bytes += announced;
    arrive();
  }
  void wait(int parity) const {
    emulation::require(valid == 1, "a barrier that is not initialised");
    while (phase == parity) emulation::yield();
  }
};
static_assert(sizeof(Barrier) == 8);

inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline void named_barrier_sync(int number, int count) {
  emulation::arrive_and_wait(emulation::barriers[number], count);
}
template <int, bool>
void set_registers() {}
inline unsigned char* shared_memory() { return emulation::shared; }

// Copies a box between shared and global memory, row by row of its innermost dimension.
inline void copy_box(const emulation::Map& map, uint32_t address, const int (&from)[4], bool load,
                     bool poison) {
  emulation::require(address % 1024 == 0 && map.box[0] == 64, "a box that is not aligned");
  for (int row = 0; row < map.box[1] * map.box[2] * map.box[3]; ++row) {
    const int at[4] = {from[0], from[1] + row % map.box[1], from[2] + row / map.box[1] % map.box[2],
                       from[3] + row / map.box[1] / map.box[2]};
    bool inside = true;
    int64_t place = 0;
    for (int i = 0; i < 4; ++i) {
      inside &= at[i] >= 0 && at[i] < map.size[i];
      place += at[i] * map.stride(i);
    }
    for (int byte = 0; byte < 128; ++byte) {
      auto& here = emulation::at(emulation::swizzled(address + 128 * row + byte));
      if (load) here = poison ? 0x7f : inside ? map.data[place + byte] : 0;
      if (!load && inside) map.data[place + byte] = here;
    }
  }
}
inline void tma_load(void* to, const CUtensorMap* map, Barrier* barrier, int c0, int c1, int c2,
                     int c3 = 0) {
  const auto& box = *reinterpret_cast<const emulation::Map*>(map);
  const uint32_t address = shared_address(to);
  copy_box(box, address, {c0, c1, c2, c3}, true, true);
  emulation::copies.push_back([=] {
    copy_box(box, address, {c0, c1, c2, c3}, true, false);
    barrier->bytes -= 128 * box.box[1] * box.box[2] * box.box[3];
    barrier->complete();
  });
}
inline void tma_store(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3) {
  const auto& box = *reinterpret_cast<const emulation::Map*>(map);
  const uint32_t address = shared_address(from);
  emulation::Thread* const thread = emulation::self;
  ++thread->stores;
  emulation::copies.push_back([=] {
    copy_box(box, address, {c0, c1, c2, c3}, false, false);
    --thread->stores;
  });
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() {
  while (emulation::self->stores > 0) emulation::yield();
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::self->groups.push_back(std::move(emulation::self->open));
  emulation::self->open.clear();
}
template <int kGroups>
void wgmma_wait() {
  auto& groups = emulation::self->groups;
  while (groups.size() > kGroups) {
    for (const auto& product : groups.front()) emulation::execute(product);
    groups.erase(groups.begin());
  }
}
inline void fence_accumulator(float (&)[64]) {}

template <bool kTransposed>
void stmatrix_x4(uint32_t row, const uint32_t (&in)[4]) {
  static_assert(!kTransposed);
  const int lane = threadIdx.x % 32;
  emulation::Warp& own = *emulation::self->warp;
  own.address[lane] = row;
  memcpy(own.values[lane], in, sizeof in);
  emulation::with_warp([](emulation::Warp& warp) {
    for (int i = 0; i < 32 * 4; ++i) {  // four bytes: of matrix, row, lane in the row
      const int matrix = i / 32, r = i / 4 % 8;
      const uint32_t to = warp.address[8 * matrix + r];
      emulation::require(to % 16 == 0, "misaligned stmatrix");
      memcpy(&emulation::at(to + i % 4 * 4), &warp.values[4 * r + i % 4][matrix], 4);
    }
  });
}

namespace fp8 {
inline void wgmma_e4m3(float (&accumulator)[64], uint64_t a, uint64_t b, bool add) {
  emulation::self->open.push_back({accumulator, a, b, add});
}
inline uint32_t uniform(uint32_t value) { return value; }
inline float read_e4m3(uint32_t address) { return emulation::number(emulation::at(address)); }
}  // namespace fp8

}  // namespace jaxunet::cuda
