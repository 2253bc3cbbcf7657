// Runs the threads of a block as fibers on one host thread.
//
// Each 16 bytes of shared memory have a cell with the last read and the last write: the interval
// between two __syncthreads in which it happened, the warp, and the number of __syncwarp that this
// warp had completed. Two accesses that no barrier orders end the program, even if the fibers
// happen to run in an order that gives the right result.
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

// The last access to a cell.
struct Access {
  int interval = -1, synced = -1;
  const Warp* warp = nullptr;  // null: several warps in the same interval
  // True if a barrier lies between the access and what this thread does next: __syncthreads, or,
  // for an access by its own warp, __syncwarp.
  bool ordered() const;
  void set();
};

struct Cell {
  bool pending = false;  // a copy to it has begun, and its thread has not yet waited for it
  Access written, read;
};

// A copy of 16 bytes to shared memory. `from`: null writes zeros.
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

// A warp, with its lanes' operands of the instruction that it executes.
struct Warp {
  int arrived = 0, count = 0;  // lanes at the next instruction; completed instructions
  int synced = 0;              // completed __syncwarp
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
  std::vector<std::vector<Copy>> groups;  // committed
  std::vector<Copy> open;                 // not yet committed
};

extern Thread* self;  // the running thread
extern bool early;    // copies take place at once, otherwise when their thread waits for them
extern std::vector<std::pair<const char*, const char*>> readable;  // arrays that copies may read

// Lets other threads run.
void yield();
// Runs a kernel, block after block.
void run(const std::function<void()>& kernel, dim3 grid, int threads, int shared_bytes);

// Waits for the other lanes of the warp. The last one executes the instruction for all.
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
