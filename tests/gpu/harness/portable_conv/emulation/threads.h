// A block's threads as fibers on one host thread, and what they share.
//
// Shared memory has a cell for each 16 bytes, which remembers in which interval between two
// __syncthreads it was last read and written, by which warp, and between which of its __syncwarp.
// Reads and writes that no barrier orders end the program, whatever the order in which the fibers
// happened to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace emulation {

[[noreturn]] inline void fail(const char* what) {
  printf("EMULATION: %s\n", what);
  exit(1);
}

struct Warp;

// The last access to a cell. It is ordered before what the calling thread does next if a barrier of
// the block or of the warp that made it lies between.
struct Access {
  int interval = -1, synced = -1;
  const Warp* warp = nullptr;  // null: several
  bool ordered() const;
  void set();
};

struct Cell {
  bool pending = false;  // a copy has begun, and its thread has not waited for it
  Access written, read;
};

// A copy of 16 bytes. `from` null: zeros.
struct Copy {
  uint32_t to;
  const void* from;
};

struct Block {
  std::vector<char> shared;
  std::vector<Cell> cells;
  int threads, arrived = 0, interval = 0;
  uint3 index;
  char* base() { return shared.data() + (-reinterpret_cast<uintptr_t>(shared.data()) & 1023); }
};

// The operands of the instruction that a warp is executing.
struct Warp {
  int arrived = 0, count = 0;  // lanes that have arrived; instructions completed
  int synced = 0;              // __syncwarp completed
  uint32_t address[32];
  uint32_t* out[32];
  float* sums[32];
  uint32_t left[32][4], right[32][2];
};

struct Thread {
  Block* block;
  Warp* warp;
  uint3 index;
  int lane;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

extern Thread* self;  // that runs now
extern bool early;    // copies take place at once; else when their thread waits for them
extern std::vector<std::pair<const char*, const char*>> readable;  // global memory

void yield();
void run(const std::function<void()>& kernel, dim3 grid, int threads, int shared_bytes);

// Waits for the other lanes; the last one executes the instruction for all.
template <class Execute>
void with_warp(Execute execute) {
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

inline bool Access::ordered() const {
  return interval < self->block->interval || (warp == self->warp && synced < warp->synced);
}
inline void Access::set() {
  const int now = self->block->interval;
  warp = interval < now || warp == self->warp ? self->warp : nullptr;
  interval = now;
  synced = self->warp->synced;
}

}  // namespace emulation

#define threadIdx (emulation::self->index)
#define blockIdx (emulation::self->block->index)

inline void __syncthreads() {
  emulation::Block& block = *emulation::self->block;
  const int now = block.interval;
  if (++block.arrived == block.threads) {
    block.arrived = 0;
    ++block.interval;
  }
  while (block.interval == now) emulation::yield();
}

inline void __syncwarp() {
  emulation::with_warp([](emulation::Warp& warp) { ++warp.synced; });
}
