// Replaces xla_ffi/common/warp_instructions.cuh in the emulation, as far as the multistage kernels
// need it. The layouts of fragments are those of mma.m16n8k16 and ldmatrix in the PTX manual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "common/launch.cuh"

namespace jaxunet::cuda {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulation::self->block->base());
}

inline emulation::Cell& cell_at(uint32_t address) {
  emulation::Block& block = *emulation::self->block;
  if (address % 16) emulation::fail("misaligned shared memory");
  if (address / 16 >= block.cells.size()) emulation::fail("outside of shared memory");
  return block.cells[address / 16];
}

inline void perform(const emulation::Copy& copy) {
  char* to = emulation::self->block->base() + copy.to;
  if (copy.from)
    memcpy(to, copy.from, 16);
  else
    memset(to, 0, 16);
}

inline void cp_async_16(uint32_t to, const void* from, bool there) {
  const char* begin = static_cast<const char*>(from);
  bool found = false;
  for (const auto& [first, last] : emulation::readable)
    found |= begin >= first && begin + 16 <= last;
  if (!found || reinterpret_cast<uintptr_t>(from) % 16) emulation::fail("a copy's source");
  emulation::Cell& cell = cell_at(to);
  if (!cell.read.ordered()) emulation::fail("a copy overtakes a read");
  if (cell.pending) emulation::fail("two copies to one place");
  cell.pending = true;
  const emulation::Copy copy{to, there ? from : nullptr};
  if (emulation::early) perform(copy);
  emulation::self->open.push_back(copy);
}

inline void cp_async_commit() {
  emulation::self->groups.push_back(std::move(emulation::self->open));
  emulation::self->open.clear();
}

template <int kPending>
void cp_async_wait() {
  auto& groups = emulation::self->groups;
  while (groups.size() > kPending) {
    for (const emulation::Copy& copy : groups.front()) {
      if (!emulation::early) perform(copy);
      cell_at(copy.to).pending = false;
      cell_at(copy.to).written.set();
    }
    groups.erase(groups.begin());
  }
}

inline void read(emulation::Cell& cell) {
  if (cell.pending || !cell.written.ordered()) emulation::fail("a read before its copy");
  cell.read.set();
}

// Fails if two lanes that the hardware serves at once access the same bank. Each lane accesses
// `bytes` bytes, so that 128 / bytes lanes are served at once.
inline void check_banks(const emulation::Warp& all, uint32_t bytes) {
  const uint32_t at_once = 128 / bytes;
  for (uint32_t first = 0; first < 32; first += at_once) {
    bool banks[32] = {};
    for (uint32_t lane = first; lane < first + at_once; ++lane) {
      if (all.address[lane] % bytes) emulation::fail("misaligned shared memory");
      bool& bank = banks[all.address[lane] / bytes % at_once];
      if (bank) emulation::fail("a bank conflict");
      bank = true;
    }
  }
}

inline void store_16(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16) emulation::fail("misaligned global memory");
  memcpy(to, from, 16);
}

inline void store_shared(uint32_t to, float first, float second) {
  emulation::Warp& warp = *emulation::self->warp;
  warp.address[emulation::self->lane] = to;
  emulation::with_warp([](emulation::Warp& all) { check_banks(all, 8); });
  emulation::Cell& cell = cell_at(to / 16 * 16);
  if (!cell.read.ordered()) emulation::fail("a write overtakes a read");
  if (cell.pending || !(cell.written.ordered() || cell.written.warp == &warp))
    emulation::fail("two writes to one place");
  cell.written.set();
  const float pair[] = {first, second};
  memcpy(emulation::self->block->base() + to, pair, sizeof(pair));
}

inline void load_shared(float* out, uint32_t from) {
  emulation::Warp& warp = *emulation::self->warp;
  warp.address[emulation::self->lane] = from;
  emulation::with_warp([](emulation::Warp& all) { check_banks(all, 16); });
  read(cell_at(from));
  memcpy(out, emulation::self->block->base() + from, 16);
}

template <bool kTransposed>
void ldmatrix_x4(uint32_t (&out)[4], uint32_t row) {
  emulation::Warp& warp = *emulation::self->warp;
  warp.out[emulation::self->lane] = out;
  warp.address[emulation::self->lane] = row;
  emulation::with_warp([](emulation::Warp& all) {
    emulation::Block& block = *emulation::self->block;
    uint16_t rows[4][8][8];
    bool banks[4][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
      read(cell_at(all.address[lane]));
      memcpy(rows[lane / 8][lane % 8], block.base() + all.address[lane], 16);
      bool& bank = banks[lane / 8][all.address[lane] / 16 % 8];
      if (bank) emulation::fail("a bank conflict");
      bank = true;
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int r = lane / 4, c = lane % 4 * 2;
        const uint32_t low = kTransposed ? rows[i][c][r] : rows[i][r][c],
                       high = kTransposed ? rows[i][c + 1][r] : rows[i][r][c + 1];
        all.out[lane][i] = low | high << 16;
      }
    }
  });
}

// One of the two 16-bit numbers of a register, the low one for which = 0.
template <class T>
float number_of(uint32_t pair, int which) {
  const auto bits = static_cast<uint16_t>(pair >> 16 * which);
  T value;
  memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

template <class T>
void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&left)[4], uint32_t right0,
                  uint32_t right1, T) {
  emulation::Warp& warp = *emulation::self->warp;
  const int mine = emulation::self->lane;
  warp.sums[mine] = accumulator;
  memcpy(warp.left[mine], left, sizeof(left));
  warp.right[mine][0] = right0;
  warp.right[mine][1] = right1;
  emulation::with_warp([](emulation::Warp& all) {
    float a[16][16], b[16][8], sums[16][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      for (int n = 0; n < 8; ++n)
        a[g + n / 2 % 2 * 8][t + n % 2 + n / 4 * 8] = number_of<T>(all.left[lane][n / 2], n % 2);
      for (int n = 0; n < 4; ++n)
        b[t + n % 2 + n / 2 * 8][g] = number_of<T>(all.right[lane][n / 2], n % 2);
    }
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 8; ++n) sums[m][n] += a[m][k] * b[k][n];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int n = 0; n < 4; ++n)
        all.sums[lane][n] += sums[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2];
    }
  });
}

}  // namespace jaxunet::cuda
