// Weight gradient of the 3×3 convolution on Hopper:
//
//   dW[i, j, c, f] = sum over pixels of x[pixel shifted by (i - 1, j - 1), c] · dy[pixel, f]
//
// A launch computes one weight gradient or several (weight_gradient_parameters.cuh), each with its
// own blocks. A block owns 64 input × 64 output channels and all nine taps: 147 KB of float32
// accumulators in registers. K runs over pixels, and a block has one split of them (split-K,
// split_k.h). Strips of 8 × 8 pixels pass through a ring in shared memory: dy, and x with one pixel
// of halo. Both operands of wgmma are MN-major, because channels are contiguous and pixels are K.
// Each consumer owns a row of taps. For tap (i, j), the operand is the haloed x starting at a
// shifted row. The descriptor's leading stride, from 64 columns of B to the next 64, is one pixel:
// a single wgmma of 64 × 192 multiplies dy by the three taps of a row.
//
// For images of at most four rows, a strip holds two samples, one below the other: 2 · 4 × 8 pixels
// of dy, 2 · 6 × 10 of x. For 4 × 4 images, a strip holds four packed samples (tile.h): 4 × 4 · 4
// pixels of dy, 6 × 6 · 4 of x; 16 steps of K are one image row.
//
// Helpers sum dy over the pixels, for the gradient of the shift. Blocks that load the same dy take
// turns, sample by sample.
//
// The gradient of a shortcut, (its input)ᵀ · dy, comes from extra blocks of the same launch, so
// that their reads overlap the wgmmas of the others. Such a block owns up to six chunks of 64
// projected channels × 64 output channels, two chunks for each consumer, and reads dy once for all
// of them. A linear layer has only these blocks.
//
// split_k_reduce adds the partial results in a fixed order, without atomics, so every run gives the
// same bits. If no other kernel reads the partial results, they are stored in the accumulators'
// layout (accumulator_tile.h), which is faster.
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
// Barriers (mbarrier). A phase completes after the given number of arrivals and, for "+ bytes",
// once TMA has written the bytes that the arrival announced. Parities alternate from 0; a wait for
// parity 1 returns at once in the first round.
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
// the 96 helpers: after `scratch` has been written, and again after it has been read.
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

// Registers per thread. All threads start with 128. The fourth warpgroup gives up 72, and each of
// the three consumers takes 24 more.
constexpr int kConsumerRegisters = 152, kHelperRegisters = 56;

template <class T, bool kPacked, class Launch>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_weight_gradient_kernel(const __grid_constant__ Launch launch) {
#ifdef JAXUNET_SM90A_PASS
  const int index = static_cast<int>(blockIdx.x), member = launch.ranges.job_of(index);
  const Block<T, kPacked> block(launch.members[member], launch.maps,
                                index - launch.ranges.first[member], shared_memory());
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
  __trap();  // never launched: common/device.h
#endif
}

}  // namespace jaxunet::cuda::weight_gradient
