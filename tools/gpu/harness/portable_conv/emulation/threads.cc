#include "threads.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

namespace emulation {

Thread* self;
bool early;
std::vector<std::pair<const char*, const char*>> readable;

namespace {

constexpr size_t kStackBytes = 64 * 1024;

// A fiber starts by setcontext and is resumed by longjmp, which, unlike swapcontext, makes no
// system call.
struct Fiber {
  Thread thread;
  ucontext_t context;
  jmp_buf jump;
  bool started = false, done = false;
  std::vector<char> stack = std::vector<char>(kStackBytes);
};

const std::function<void()>* body;
Fiber* current;
jmp_buf scheduler;

void begin() {
  (*body)();
  current->done = true;
  _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  current = &fiber;
  self = &fiber.thread;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.jump, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Runs the warps round by round, each time in a new random order, until all threads are done.
void run_block(std::vector<Fiber>& fibers, std::mt19937& random) {
  std::vector<size_t> order(fibers.size() / 32);
  std::iota(order.begin(), order.end(), 0);
  size_t left = fibers.size();
  for (int idle = 0; left > 0;) {
    std::shuffle(order.begin(), order.end(), random);
    const size_t before = left;
    for (const size_t warp : order) {
      for (int lane = 0; lane < 32; ++lane) {
        Fiber& fiber = fibers[32 * warp + lane];
        if (fiber.done) continue;
        resume(fiber);
        if (fiber.done) --left;
      }
    }
    idle = left == before ? idle + 1 : 0;
    if (idle > 10'000'000) fail("deadlock");
  }
}

}  // namespace

void yield() {
  if (!_setjmp(current->jump)) _longjmp(scheduler, 1);
}

void run(const std::function<void()>& kernel, dim3 grid, int threads, int shared_bytes) {
  if (threads % 32 || threads > 1024 || shared_bytes > 99 * 1024 || grid.y > 65535)
    fail("launch limits");
  static std::mt19937 random(7);
  body = &kernel;
  std::vector<Fiber> fibers(threads);
  for (unsigned i = 0; i < grid.x * grid.y; ++i) {
    Block block;
    block.shared.assign(shared_bytes + 1024 + 16, static_cast<char>(0xff));  // NaN
    block.cells.resize(shared_bytes / 16);
    block.threads = threads;
    block.index = {i % grid.x, i / grid.x, 0};
    std::vector<Warp> warps(threads / 32);
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
      fiber.thread = {&block, &warps[t / 32], {static_cast<unsigned>(t), 0, 0}, t % 32};
      fiber.started = fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, begin, 0);
    }
    run_block(fibers, random);
    for (const Cell& cell : block.cells) {
      if (cell.pending) fail("a block ends before a copy");
    }
    for (int n = 0; n < 16; ++n) {
      if (block.base()[shared_bytes + n] != static_cast<char>(0xff))
        fail("a write beyond shared memory");
    }
  }
}

}  // namespace emulation
