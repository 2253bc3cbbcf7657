// wgmma: the product of a 64 × 16 by a 16 × N matrix of 16-bit numbers in shared memory, added to a warpgroup's float32
// registers.
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15: sums[4 j] and [4 j + 1] are row lane / 4, columns 8 j + 2 (lane
// % 4) and the next; [4 j + 2] and [4 j + 3] the same columns eight rows further down.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxunet::cuda {

// A matrix in shared memory, 128-byte swizzled: atoms of 8 rows of 128 bytes. The swizzle exchanges bits 4-6 of an
// address by 7-9 of the same address, so a matrix may start at any row, not only where an atom of 1024 bytes starts.
//
//   along K (kAcross = false): a row holds 64 steps of K; `stride` bytes lead to the next 8 rows; 16 steps of K are 32
//   bytes further on. across K (kAcross = true): a row holds 64 rows (columns) of the matrix at one step of K; `stride`
//   bytes lead to the next 8 steps of K, `leading` bytes to the next 64 rows (columns).
__device__ inline uint64_t matrix(uint32_t address, int stride, int leading = 0) {
  constexpr uint64_t swizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | swizzle128 << 62;
}

// The same matrix, so many bytes on.
__device__ inline uint64_t advance(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

// sums = add ? sums + a · b : a · b. Asynchronous: between `begin_products` and the wait nobody else may touch `sums`.
template <class T, bool kAcrossA, bool kAcrossB, int kColumns>
struct Product;

// The operands of the instruction: "%0, %1, ..." and "+f"(sums[0]), "+f"(sums[1]), ..., ten at a time.
#define JAXUNET_NAMES_10(T) \
  "%" #T "0, %" #T "1, %" #T "2, %" #T "3, %" #T "4, %" #T "5, %" #T "6, %" #T "7, %" #T "8, %" #T "9, "
#define JAXUNET_NAMES_30 JAXUNET_NAMES_10() JAXUNET_NAMES_10(1) JAXUNET_NAMES_10(2)
#define JAXUNET_NAMES_60 JAXUNET_NAMES_30 JAXUNET_NAMES_10(3) JAXUNET_NAMES_10(4) JAXUNET_NAMES_10(5)
#define JAXUNET_NAMES_90 JAXUNET_NAMES_60 JAXUNET_NAMES_10(6) JAXUNET_NAMES_10(7) JAXUNET_NAMES_10(8)
#define JAXUNET_NAMES_120 JAXUNET_NAMES_90 JAXUNET_NAMES_10(9) JAXUNET_NAMES_10(10) JAXUNET_NAMES_10(11)
#define JAXUNET_NAMES_32 JAXUNET_NAMES_30 "%30, %31"
#define JAXUNET_NAMES_44 JAXUNET_NAMES_30 JAXUNET_NAMES_10(3) "%40, %41, %42, %43"
#define JAXUNET_NAMES_64 JAXUNET_NAMES_60 "%60, %61, %62, %63"
#define JAXUNET_NAMES_88 \
  JAXUNET_NAMES_60 JAXUNET_NAMES_10(6) JAXUNET_NAMES_10(7) "%80, %81, %82, %83, %84, %85, %86, %87"
#define JAXUNET_NAMES_96 JAXUNET_NAMES_90 "%90, %91, %92, %93, %94, %95"
#define JAXUNET_NAMES_128 JAXUNET_NAMES_120 "%120, %121, %122, %123, %124, %125, %126, %127"

#define JAXUNET_SUMS_2(I, J) "+f"(sums[I]), "+f"(sums[J])
#define JAXUNET_SUMS_10(T)                                                                                        \
  JAXUNET_SUMS_2(T##0, T##1), JAXUNET_SUMS_2(T##2, T##3), JAXUNET_SUMS_2(T##4, T##5), JAXUNET_SUMS_2(T##6, T##7), \
      JAXUNET_SUMS_2(T##8, T##9)
#define JAXUNET_SUMS_30 JAXUNET_SUMS_10(), JAXUNET_SUMS_10(1), JAXUNET_SUMS_10(2)
#define JAXUNET_SUMS_60 JAXUNET_SUMS_30, JAXUNET_SUMS_10(3), JAXUNET_SUMS_10(4), JAXUNET_SUMS_10(5)
#define JAXUNET_SUMS_90 JAXUNET_SUMS_60, JAXUNET_SUMS_10(6), JAXUNET_SUMS_10(7), JAXUNET_SUMS_10(8)
#define JAXUNET_SUMS_120 JAXUNET_SUMS_90, JAXUNET_SUMS_10(9), JAXUNET_SUMS_10(10), JAXUNET_SUMS_10(11)
#define JAXUNET_SUMS_32 JAXUNET_SUMS_30, JAXUNET_SUMS_2(30, 31)
#define JAXUNET_SUMS_44 JAXUNET_SUMS_30, JAXUNET_SUMS_10(3), JAXUNET_SUMS_2(40, 41), JAXUNET_SUMS_2(42, 43)
#define JAXUNET_SUMS_64 JAXUNET_SUMS_60, JAXUNET_SUMS_2(60, 61), JAXUNET_SUMS_2(62, 63)
#define JAXUNET_SUMS_88                                                                                    \
  JAXUNET_SUMS_60, JAXUNET_SUMS_10(6), JAXUNET_SUMS_10(7), JAXUNET_SUMS_2(80, 81), JAXUNET_SUMS_2(82, 83), \
      JAXUNET_SUMS_2(84, 85), JAXUNET_SUMS_2(86, 87)
#define JAXUNET_SUMS_96 JAXUNET_SUMS_90, JAXUNET_SUMS_2(90, 91), JAXUNET_SUMS_2(92, 93), JAXUNET_SUMS_2(94, 95)
#define JAXUNET_SUMS_128                                                                          \
  JAXUNET_SUMS_120, JAXUNET_SUMS_2(120, 121), JAXUNET_SUMS_2(122, 123), JAXUNET_SUMS_2(124, 125), \
      JAXUNET_SUMS_2(126, 127)

// A, B, ADD, ACROSS_A, ACROSS_B: the numbers of the operands that follow COUNT sums.
#define JAXUNET_PRODUCT(TYPE, NAME, COLUMNS, COUNT, A, B, ADD, ACROSS_A, ACROSS_B)                              \
  template <bool kAcrossA, bool kAcrossB>                                                                       \
  struct Product<TYPE, kAcrossA, kAcrossB, COLUMNS> {                                                           \
    __device__ static void run(float (&sums)[COUNT], uint64_t a, uint64_t b, bool add) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k16.f32." NAME " {" JAXUNET_NAMES_##COUNT "}, %" #A ", %" #B ", p, 1, 1, %" #ACROSS_A       \
                                                              ", %" #ACROSS_B ";\n}\n"                          \
                   : JAXUNET_SUMS_##COUNT                                                                       \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kAcrossA)),               \
                     "n"(static_cast<int>(kAcrossB)));                                                          \
    }                                                                                                           \
  };
#define JAXUNET_PRODUCTS(TYPE, NAME)                        \
  JAXUNET_PRODUCT(TYPE, NAME, 64, 32, 32, 33, 34, 35, 36)   \
  JAXUNET_PRODUCT(TYPE, NAME, 88, 44, 44, 45, 46, 47, 48)   \
  JAXUNET_PRODUCT(TYPE, NAME, 128, 64, 64, 65, 66, 67, 68)  \
  JAXUNET_PRODUCT(TYPE, NAME, 176, 88, 88, 89, 90, 91, 92)  \
  JAXUNET_PRODUCT(TYPE, NAME, 192, 96, 96, 97, 98, 99, 100) \
  JAXUNET_PRODUCT(TYPE, NAME, 256, 128, 128, 129, 130, 131, 132)
JAXUNET_PRODUCTS(__nv_bfloat16, "bf16.bf16")
JAXUNET_PRODUCTS(__half, "f16.f16")

// Before the first product of a chain, and whenever `sums` was touched in between.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a batch of products.
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kBatches` batches of this warp are unfinished.
template <int kBatches>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kBatches) : "memory");
}

// After the wait for the last batch: keeps the compiler from reading `sums` ahead of it.
template <int kCount>
__device__ inline void settle(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace jaxunet::cuda
