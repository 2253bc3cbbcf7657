// Warp-level instructions of compute capability 8.0 and later: ldmatrix, mma.sync of a 16 × K by a
// K × 8 matrix, and cp.async. PTX defines the layout of the fragments ("mma.m16n8k16",
// "mma.m16n8k8").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/shared_address.cuh"

namespace jaxunet::cuda {

// Loads four 8 × 8 matrices of 16-bit numbers from shared memory. Lanes 0-7, 8-15, 16-23 and 24-31
// give the addresses (`row`) of the rows of one matrix each. kTransposed: transposes each matrix.
template <bool kTransposed>
__device__ inline void ldmatrix_x4(uint32_t (&out)[4], uint32_t row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
  }
}
template <bool kTransposed>
__device__ inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
  ldmatrix_x4<kTransposed>(out, shared_address(row));
}

// accumulator += left · right, K = 16.
__device__ inline void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&left)[4],
                                    uint32_t right0, uint32_t right1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
__device__ inline void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&left)[4],
                                    uint32_t right0, uint32_t right1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, "
      "%3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// Starts to copy 16 bytes from global to shared memory, or writes 16 zero bytes unless `there`.
// Both addresses are multiples of 16; `from` must be valid either way.
__device__ inline void cp_async_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
// The same, with a hint to fetch the 128 bytes around `from` into L2.
__device__ inline void cp_async_16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// Waits for this thread's copies. A barrier afterwards makes every thread's copies visible.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Closes this thread's group of copies, which may be empty.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups, the latest ones, are incomplete.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores 16 bytes to global memory; in asm, because nvcc 13.0 splits a plain store.
__device__ inline void store_16(void* to, const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// Stores two adjacent floats to shared memory, at a multiple of 8 bytes.
__device__ inline void store_shared(uint32_t to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}
// Loads four adjacent floats from shared memory, at a multiple of 16 bytes.
__device__ inline void load_shared(float* out, uint32_t from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(from)
               : "memory");
}

// x rounded to tf32, which has 11 significant bits.
__device__ inline uint32_t tf32(float x) {
  uint32_t out;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(x));
  return out;
}

// accumulator += left · right in tf32, K = 8.
__device__ inline void mma_m16n8k8(float (&accumulator)[4], const uint32_t (&left)[4],
                                   const uint32_t (&right)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, "
      "%3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

}  // namespace jaxunet::cuda
