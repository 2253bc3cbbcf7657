// wgmma: D (64 × N, float32 in the registers of a warpgroup) += A (64 × 16) · B (16 × N), where A
// and B are 16-bit numbers in shared memory, or A is in registers; and stmatrix, which writes the 8
// × 8 matrices of an accumulator to shared memory.
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15. In these, accumulator[4 j] and [4 j + 1]
// are row lane / 4, columns 8 j + 2 (lane % 4) and the next; [4 j + 2] and [4 j + 3] are the same
// columns eight rows further down.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/warp_instructions.cuh"

namespace jaxunet::cuda {

// The descriptor of a matrix in shared memory with the 128-byte swizzle: atoms of 8 rows of 128
// bytes. The swizzle XORs bits 7-9 of an address, the row in its atom, into bits 4-6, the 16 bytes
// in the row. It depends only on the address, so a matrix may start at any row of an atom. PTX
// guarantees this only if the base offset (bits 49-51) is that row; here it is 0, and
// tools/gpu/harness/wgmma/canary.cu checks that the hardware still reads the right rows.
//
// K-major (kMnMajor = false): a row holds 64 steps of K; the next 8 rows of the matrix are `stride`
// bytes further on, the next 16 steps of K 32 bytes. MN-major (kMnMajor = true): a row holds 64
// rows of A (columns of B) at one step of K; the next 8 steps of K are `stride` bytes further on,
// the next 64 rows (columns) `leading` bytes.
//
// Bits of a descriptor: 0-13 the address, 16-29 `leading`, 32-45 `stride`, all in units of 16
// bytes; 62-63 the swizzle.
__device__ inline uint64_t smem_descriptor(uint32_t address, int stride, int leading = 0) {
  constexpr uint64_t swizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | swizzle128 << 62;
}

// The descriptor of the same matrix, moved by `bytes`.
__device__ inline uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// accumulator = add ? accumulator + a · b : a · b; a and b are descriptors. Asynchronous: between
// `wgmma_fence` and the wait nothing else may touch the accumulator. kN: columns of B; a thread
// holds kN / 2 numbers of the accumulator.
template <class T, bool kMnMajorA, bool kMnMajorB, int kN>
struct Wgmma;

// The operands of the instruction: "%0, %1, ..." and "+f"(accumulator[0]), "+f"(accumulator[1]),
// ..., ten at a time.
#define JAXUNET_NAMES_10(T)                                                                        \
  "%" #T "0, %" #T "1, %" #T "2, %" #T "3, %" #T "4, %" #T "5, %" #T "6, %" #T "7, %" #T "8, %" #T \
  "9, "
#define JAXUNET_NAMES_16 JAXUNET_NAMES_10() "%10, %11, %12, %13, %14, %15"
#define JAXUNET_NAMES_30 JAXUNET_NAMES_10() JAXUNET_NAMES_10(1) JAXUNET_NAMES_10(2)
#define JAXUNET_NAMES_60 \
  JAXUNET_NAMES_30 JAXUNET_NAMES_10(3) JAXUNET_NAMES_10(4) JAXUNET_NAMES_10(5)
#define JAXUNET_NAMES_90 \
  JAXUNET_NAMES_60 JAXUNET_NAMES_10(6) JAXUNET_NAMES_10(7) JAXUNET_NAMES_10(8)
#define JAXUNET_NAMES_120 \
  JAXUNET_NAMES_90 JAXUNET_NAMES_10(9) JAXUNET_NAMES_10(10) JAXUNET_NAMES_10(11)
#define JAXUNET_NAMES_32 JAXUNET_NAMES_30 "%30, %31"
#define JAXUNET_NAMES_44 JAXUNET_NAMES_30 JAXUNET_NAMES_10(3) "%40, %41, %42, %43"
#define JAXUNET_NAMES_64 JAXUNET_NAMES_60 "%60, %61, %62, %63"
#define JAXUNET_NAMES_88 \
  JAXUNET_NAMES_60 JAXUNET_NAMES_10(6) JAXUNET_NAMES_10(7) "%80, %81, %82, %83, %84, %85, %86, " \
                                                           "%87"
#define JAXUNET_NAMES_96 JAXUNET_NAMES_90 "%90, %91, %92, %93, %94, %95"
#define JAXUNET_NAMES_128 JAXUNET_NAMES_120 "%120, %121, %122, %123, %124, %125, %126, %127"

#define JAXUNET_REGISTERS_2(I, J) "+f"(accumulator[I]), "+f"(accumulator[J])
#define JAXUNET_REGISTERS_10(T)                                         \
  JAXUNET_REGISTERS_2(T##0, T##1), JAXUNET_REGISTERS_2(T##2, T##3),     \
      JAXUNET_REGISTERS_2(T##4, T##5), JAXUNET_REGISTERS_2(T##6, T##7), \
      JAXUNET_REGISTERS_2(T##8, T##9)
#define JAXUNET_REGISTERS_16                                                        \
  JAXUNET_REGISTERS_10(), JAXUNET_REGISTERS_2(10, 11), JAXUNET_REGISTERS_2(12, 13), \
      JAXUNET_REGISTERS_2(14, 15)
#define JAXUNET_REGISTERS_30 \
  JAXUNET_REGISTERS_10(), JAXUNET_REGISTERS_10(1), JAXUNET_REGISTERS_10(2)
#define JAXUNET_REGISTERS_60 \
  JAXUNET_REGISTERS_30, JAXUNET_REGISTERS_10(3), JAXUNET_REGISTERS_10(4), JAXUNET_REGISTERS_10(5)
#define JAXUNET_REGISTERS_90 \
  JAXUNET_REGISTERS_60, JAXUNET_REGISTERS_10(6), JAXUNET_REGISTERS_10(7), JAXUNET_REGISTERS_10(8)
#define JAXUNET_REGISTERS_120 \
  JAXUNET_REGISTERS_90, JAXUNET_REGISTERS_10(9), JAXUNET_REGISTERS_10(10), JAXUNET_REGISTERS_10(11)
#define JAXUNET_REGISTERS_32 JAXUNET_REGISTERS_30, JAXUNET_REGISTERS_2(30, 31)
#define JAXUNET_REGISTERS_44                                                  \
  JAXUNET_REGISTERS_30, JAXUNET_REGISTERS_10(3), JAXUNET_REGISTERS_2(40, 41), \
      JAXUNET_REGISTERS_2(42, 43)
#define JAXUNET_REGISTERS_64 \
  JAXUNET_REGISTERS_60, JAXUNET_REGISTERS_2(60, 61), JAXUNET_REGISTERS_2(62, 63)
#define JAXUNET_REGISTERS_88                                                                 \
  JAXUNET_REGISTERS_60, JAXUNET_REGISTERS_10(6), JAXUNET_REGISTERS_10(7),                    \
      JAXUNET_REGISTERS_2(80, 81), JAXUNET_REGISTERS_2(82, 83), JAXUNET_REGISTERS_2(84, 85), \
      JAXUNET_REGISTERS_2(86, 87)
#define JAXUNET_REGISTERS_96                                                      \
  JAXUNET_REGISTERS_90, JAXUNET_REGISTERS_2(90, 91), JAXUNET_REGISTERS_2(92, 93), \
      JAXUNET_REGISTERS_2(94, 95)
#define JAXUNET_REGISTERS_128                                                          \
  JAXUNET_REGISTERS_120, JAXUNET_REGISTERS_2(120, 121), JAXUNET_REGISTERS_2(122, 123), \
      JAXUNET_REGISTERS_2(124, 125), JAXUNET_REGISTERS_2(126, 127)

// A, B, ADD, MN_MAJOR_A, MN_MAJOR_B: the asm operand numbers that follow the COUNT registers. The
// "1, 1" in the instruction scale A and B by 1: neither is negated.
#define JAXUNET_WGMMA(TYPE, NAME, N, COUNT, A, B, ADD, MN_MAJOR_A, MN_MAJOR_B)                     \
  template <bool kMnMajorA, bool kMnMajorB>                                                        \
  struct Wgmma<TYPE, kMnMajorA, kMnMajorB, N> {                                                    \
    __device__ static void run(float (&accumulator)[COUNT], uint64_t a, uint64_t b, bool add) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD                                       \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME                    \
                   " {" JAXUNET_NAMES_##COUNT "}, %" #A ", %" #B ", p, 1, 1, %" #MN_MAJOR_A        \
                                              ", %" #MN_MAJOR_B ";\n}\n"                           \
                   : JAXUNET_REGISTERS_##COUNT                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kMnMajorA)), \
                     "n"(static_cast<int>(kMnMajorB)));                                            \
    }                                                                                              \
  };
#define JAXUNET_WGMMAS(TYPE, NAME)                        \
  JAXUNET_WGMMA(TYPE, NAME, 32, 16, 16, 17, 18, 19, 20)   \
  JAXUNET_WGMMA(TYPE, NAME, 64, 32, 32, 33, 34, 35, 36)   \
  JAXUNET_WGMMA(TYPE, NAME, 88, 44, 44, 45, 46, 47, 48)   \
  JAXUNET_WGMMA(TYPE, NAME, 128, 64, 64, 65, 66, 67, 68)  \
  JAXUNET_WGMMA(TYPE, NAME, 176, 88, 88, 89, 90, 91, 92)  \
  JAXUNET_WGMMA(TYPE, NAME, 192, 96, 96, 97, 98, 99, 100) \
  JAXUNET_WGMMA(TYPE, NAME, 256, 128, 128, 129, 130, 131, 132)
JAXUNET_WGMMAS(__nv_bfloat16, "bf16.bf16")
JAXUNET_WGMMAS(__half, "f16.f16")

// The same with A (64 × 16) in registers, laid out like an accumulator whose columns are the steps
// of K: registers 0 and 2 hold row lane / 4 at K = 2 (lane % 4) and 8 steps further on, registers 1
// and 3 the row eight further down. They may not change before the wait.
template <class T, bool kMnMajorB, int kN>
struct WgmmaRegisters;

// A0 to A3, B, ADD, MN_MAJOR_B: the asm operand numbers that follow the COUNT registers.
#define JAXUNET_WGMMA_REGISTERS(TYPE, NAME, N, COUNT, A0, A1, A2, A3, B, ADD, MN_MAJOR_B)         \
  template <bool kMnMajorB>                                                                       \
  struct WgmmaRegisters<TYPE, kMnMajorB, N> {                                                     \
    __device__ static void run(float (&accumulator)[COUNT], const uint32_t (&a)[4], uint64_t b,   \
                               bool add) {                                                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD                                      \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME                   \
                   " {" JAXUNET_NAMES_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B \
                                              ", p, 1, 1, %" #MN_MAJOR_B ";\n}\n"                 \
                   : JAXUNET_REGISTERS_##COUNT                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                     "r"(static_cast<int>(add)), "n"(static_cast<int>(kMnMajorB)));               \
    }                                                                                             \
  };
#define JAXUNET_WGMMAS_REGISTERS(TYPE, NAME)                              \
  JAXUNET_WGMMA_REGISTERS(TYPE, NAME, 32, 16, 16, 17, 18, 19, 20, 21, 22) \
  JAXUNET_WGMMA_REGISTERS(TYPE, NAME, 64, 32, 32, 33, 34, 35, 36, 37, 38) \
  JAXUNET_WGMMA_REGISTERS(TYPE, NAME, 256, 128, 128, 129, 130, 131, 132, 133, 134)
JAXUNET_WGMMAS_REGISTERS(__nv_bfloat16, "bf16.bf16")
JAXUNET_WGMMAS_REGISTERS(__half, "f16.f16")

// Required before the first wgmma, and again after other code has touched the accumulator or the
// registers of A.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of wgmmas.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kGroups` of this warp's groups are unfinished.
template <int kGroups>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from reading the accumulator before the last `wgmma_wait`. Call it right after
// that wait.
template <int kCount>
__device__ inline void fence_accumulator(float (&accumulator)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulator[i])::"memory");
}

// Stores four 8 × 8 matrices of 16-bit numbers, laid out as in an accumulator, to shared memory:
// the inverse of ldmatrix_x4 (common/warp_instructions.cuh).
template <bool kTransposed>
__device__ inline void stmatrix_x4(uint32_t row, const uint32_t (&in)[4]) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
        "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
                 : "memory");
  }
}

}  // namespace jaxunet::cuda
