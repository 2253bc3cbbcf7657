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

#define JAXUNET_PRODUCT(T, NAME)                                                                                     \
  template <bool kAcrossA, bool kAcrossB>                                                                            \
  struct Product<T, kAcrossA, kAcrossB, 64> {                                                                        \
    __device__ static void run(float (&sums)[32], uint64_t a, uint64_t b, bool add) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." NAME      \
                   " {"                                                                                              \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                  \
                   "}, %32, %33, p, 1, 1, %35, %36;\n}\n"                                                            \
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
                     "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
                     "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
                     "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
                     "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
                     "+f"(sums[30]), "+f"(sums[31])                                                                  \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kAcrossA)),                    \
                     "n"(static_cast<int>(kAcrossB)));                                                               \
    }                                                                                                                \
  };
JAXUNET_PRODUCT(__nv_bfloat16, "bf16.bf16")
JAXUNET_PRODUCT(__half, "f16.f16")
#undef JAXUNET_PRODUCT

#define JAXUNET_PRODUCT(T, NAME)                                                                                     \
  template <bool kAcrossA, bool kAcrossB>                                                                            \
  struct Product<T, kAcrossA, kAcrossB, 128> {                                                                       \
    __device__ static void run(float (&sums)[64], uint64_t a, uint64_t b, bool add) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." NAME     \
                   " {"                                                                                              \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                  \
                   "}, %64, %65, p, 1, 1, %67, %68;\n}\n"                                                            \
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
                     "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
                     "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
                     "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
                     "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
                     "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), \
                     "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), \
                     "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), \
                     "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), \
                     "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), \
                     "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])                                  \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kAcrossA)),                    \
                     "n"(static_cast<int>(kAcrossB)));                                                               \
    }                                                                                                                \
  };
JAXUNET_PRODUCT(__nv_bfloat16, "bf16.bf16")
JAXUNET_PRODUCT(__half, "f16.f16")
#undef JAXUNET_PRODUCT

#define JAXUNET_PRODUCT(T, NAME)                                                                                     \
  template <bool kAcrossA, bool kAcrossB>                                                                            \
  struct Product<T, kAcrossA, kAcrossB, 192> {                                                                       \
    __device__ static void run(float (&sums)[96], uint64_t a, uint64_t b, bool add) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32." NAME     \
                   " {"                                                                                              \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                \
                   "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                \
                   "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                  \
                   "}, %96, %97, p, 1, 1, %99, %100;\n}\n"                                                           \
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
                     "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
                     "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
                     "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
                     "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
                     "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), \
                     "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), \
                     "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), \
                     "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), \
                     "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), \
                     "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]), \
                     "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]), \
                     "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]), \
                     "+f"(sums[78]), "+f"(sums[79]), "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]), \
                     "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]), \
                     "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95])  \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kAcrossA)),                    \
                     "n"(static_cast<int>(kAcrossB)));                                                               \
    }                                                                                                                \
  };
JAXUNET_PRODUCT(__nv_bfloat16, "bf16.bf16")
JAXUNET_PRODUCT(__half, "f16.f16")
#undef JAXUNET_PRODUCT

#define JAXUNET_PRODUCT(T, NAME)                                                                                       \
  template <bool kAcrossA, bool kAcrossB>                                                                              \
  struct Product<T, kAcrossA, kAcrossB, 256> {                                                                         \
    __device__ static void run(float (&sums)[128], uint64_t a, uint64_t b, bool add) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." NAME      \
                   " {"                                                                                                \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
                   "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
                   "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
                   "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
                   "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"    \
                   "}, %128, %129, p, 1, 1, %131, %132;\n}\n"                                                          \
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),         \
                     "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),       \
                     "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),   \
                     "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),   \
                     "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),   \
                     "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),   \
                     "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),   \
                     "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),   \
                     "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]),   \
                     "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),   \
                     "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]),   \
                     "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),   \
                     "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]),   \
                     "+f"(sums[78]), "+f"(sums[79]), "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),   \
                     "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]),   \
                     "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),   \
                     "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]), "+f"(sums[100]), "+f"(sums[101]), \
                     "+f"(sums[102]), "+f"(sums[103]), "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]),              \
                     "+f"(sums[107]), "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),              \
                     "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]), "+f"(sums[116]),              \
                     "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]), "+f"(sums[120]), "+f"(sums[121]),              \
                     "+f"(sums[122]), "+f"(sums[123]), "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]),              \
                     "+f"(sums[127])                                                                                   \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kAcrossA)),                      \
                     "n"(static_cast<int>(kAcrossB)));                                                                 \
    }                                                                                                                  \
  };
JAXUNET_PRODUCT(__nv_bfloat16, "bf16.bf16")
JAXUNET_PRODUCT(__half, "f16.f16")
#undef JAXUNET_PRODUCT

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
