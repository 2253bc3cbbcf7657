// The instructions of kernel.cuh: those of xla_ffi/common, and wgmma for e4m3.
// emulation/instructions.cuh replaces this file on a CPU.
#pragma once

#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

namespace jaxunet::cuda::fp8 {

// accumulator = add ? accumulator + a · b : a · b, where a (64 × 32) and b (32 × 128) are
// descriptors of K-major matrices of e4m3 in shared memory; there is no other layout for 8 bits.
// A step of K is 32 bytes of a row, as in 16 bits, and the accumulator has the same layout.
__device__ inline void wgmma_e4m3(float (&accumulator)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" JAXUNET_NAMES_64
      "}, %64, %65, p, 1, 1;\n}\n"
      : JAXUNET_REGISTERS_64
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// `value`, which is the same in all lanes of the warp, in a uniform register, which descriptors
// need.
__device__ inline uint32_t uniform(uint32_t value) { return __reduce_max_sync(~0u, value); }

// The number that the e4m3 in a byte of shared memory stands for.
__device__ inline float read_e4m3(uint32_t address) {
  uint32_t halves;
  asm volatile(
      "{\n.reg .b16 pair;\n.reg .b32 byte;\nld.shared.u8 byte, [%1];\ncvt.u16.u32 pair, byte;\n"
      "cvt.rn.f16x2.e4m3x2 %0, pair;\n}\n"
      : "=r"(halves)
      : "r"(address));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(halves)));
}

}  // namespace jaxunet::cuda::fp8
