// Weight gradient of the 3×3 convolution on Hopper:
//
//   dW[i, j, c, f] = sum over pixels of x[pixel shifted by (i - 1, j - 1), c] · dy[pixel, f]
//
// A block owns 64 input × 64 output channels and all nine taps: 147 KB of float32 accumulators in
// registers. K runs over pixels, of which the block has a share (split-K, split_k.h). Strips of 8 ×
// 8 pixels pass through a ring in shared memory: dy, and x with one pixel of halo. Both operands of
// wgmma are MN-major, as channels are contiguous and pixels are K. Each consumer owns a row of
// taps. Tap (i, j) is the haloed x starting at a shifted row, and the descriptor's leading stride,
// from 64 columns of B to the next, is one pixel: a single wgmma of 64 × 192 multiplies dy by the
// three taps of a row.
//
// Images of at most four rows: a strip has two samples, one below the other: dy's 2 · 4 × 8 pixels,
// x's 2 · 6 × 10. 4 × 4 images: a strip has four samples, packed (tile.h): dy's 4 × 4 · 4 pixels,
// x's 6 × 6 · 4; 16 steps of K are one image row.
//
// Helpers sum dy over the pixels, for the gradient of the shift. Blocks that load the same dy take
// turns at this, sample by sample.
//
// The gradient of a shortcut, (its input)ᵀ · dy, comes from extra blocks of the same launch, so
// that their reads overlap the products of the others. Such a block owns up to six chunks of 64
// projected channels × 64 output channels, two chunks for each consumer, and reads dy once for all
// of them. In a linear layer these are the only blocks.
//
// split_k_reduce adds the partial results in a fixed order, without atomics, so every run gives the
// same bits. If it is their only reader, they are stored in the accumulators' layout
// (accumulator_tile.h), which is faster.
//
// Warp roles: four warpgroups of 128 threads, one block on a multiprocessor
//
//     global memory             shared memory                    registers
//
//     x, dy,        --TMA--->   ring of 8 stages  ------------>  consumer 0, 1, 2 = warpgroup:
//     projected                   | dy                           wgmma; a row of taps each, or
//                                 v                              two projected chunks each
//       producer:               helpers: warps 1 to 3 of           |
//       warpgroup 3, warp 0,    warpgroup 3 (96 threads)           |
//       one thread                |                                v
//                                 v                              partial results
//                               partial sums of dy               (both to global memory)
//
// Barriers (mbarrier). A phase completes after the given arrivals and, for "+ bytes", once TMA has
// written what was announced. Parities alternate from 0; a wait for parity 1 passes at once in the
// first round.
//
//     barrier   waits                       arrives (arrivals)                parity waited for
//     full[8]   consumers; helpers, if the  producer (1 + bytes of the boxes) 0, flips when the
//               block sums dy                                                 ring wraps
//     empty[8]  producer                    lane 0 of each warp of a consumer 1, flips when the
//                                           that has work (4 for each); if    ring wraps
//                                           the block sums dy, lane 0 of
//                                           each helper warp (3)
//
// A consumer releases a stage one step late, after it has issued the next wgmmas. Named barrier 1,
// the 96 helpers: `scratch` has been written; `scratch` has been read.
//
// Shared memory, in this order; the ring begins at a multiple of 1024 bytes:
//
//     ring      kernel's gradient: 8 x kXBytes of haloed x, then 8 x kDyBytes of dy
//               shortcut's gradient: 3 to 8 stages of (1 + chunks) x kDyBytes: dy, then the chunks
//     barriers  kBarrierBytes: full, empty
//     scratch   12 x 64 floats: sums of dy of the helpers
#pragma once

#include "common/launch.cuh"
#include "conv3x3/hopper/weight_gradient_consumer.cuh"
#include "conv3x3/hopper/weight_gradient_helpers.cuh"
#include "conv3x3/hopper/weight_gradient_producer.cuh"

namespace jaxunet::cuda::weight_gradient {

// Registers of a thread. At launch all have 128; the fourth warpgroup gives up 72, which the three
// consumers share.
constexpr int kConsumerRegisters = 152, kHelperRegisters = 56;

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_weight_gradient_kernel(const __grid_constant__ Parameters parameters) {
#ifdef JAXUNET_SM90A_PASS
  const Block<T, kPacked> block(parameters, shared_memory());
  if (threadIdx.x == 0) {
    block.init_barriers();
    fence_barrier_init();
  }
  if (threadIdx.x == kThreads - 1) block.prefetch_maps();
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup < kConsumers) {
    set_registers<kConsumerRegisters, true>();
    if (block.chunks) {
      consume_projected(block, warpgroup);
    } else {
      consume(block, warpgroup);
    }
  } else {
    set_registers<kHelperRegisters, false>();
    const int thread = threadIdx.x % kWarpgroup;
    if (thread == 0) {
      if (block.chunks) {
        produce_projected(block);
      } else {
        produce(block);
      }
    }
    if (thread >= kWarpgroup - kHelpers && block.sums_dy) help(block);
  }
#else
  __trap();  // the host does not launch it (common/device.h)
#endif
}

}  // namespace jaxunet::cuda::weight_gradient
