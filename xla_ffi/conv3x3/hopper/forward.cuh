// Forward 3×3 convolution and its input gradient on Hopper: an implicit GEMM (wgmma, TMA) that
// reads each input strip once, with its halo, and multiplies it at nine offsets.
//
// y[pixel, feature] = sum over taps and channels of x[pixel + tap, channel] · kernel[tap, channel,
// feature]. A strip of 8 columns and its halo arrive as one TMA box of 10 columns × (rows + 2) × 64
// channels, zero outside of the image. A pixel is one swizzled row of 128 bytes, so the operand of
// tap (dy, dx) is the same buffer, starting dy · 10 + dx rows later, with 10 rows between groups of
// eight pixels. The input is read from L2 once instead of nine times. Packed strips (tile.h) are
// boxes of 64 channels × samples × 6 columns × 6 rows, and their groups of eight pixels are
// contiguous.
//
// A shortcut extends K: the centre tap of its own input (`projected`), with its weights. A linear
// layer is a shortcut without the nine taps. The input gradient is the same convolution with the
// kernel flipped (kFlipped).
//
// With Traits::kPhases (phases.h), the kernel convolves an upsampled image, with four taps per
// chunk instead of nine.
//
// The grid is persistent. One output tile is one strip for each consumer × `features` output
// channels. Block b first computes tile b. With at least four tiles per block (tile.h), the
// producer of each block then draws the next tile from a counter while it loads the current one; if
// a block starts late, because another kernel (such as NCCL's) holds its multiprocessor, the others
// compute all but the first of its tiles. Otherwise the next tiles are b + gridDim.x, b + 2 ·
// gridDim.x, ... Which block computes a tile changes no bit of it.
//
// Warp roles: warpgroups of 128 threads; C = 1 or 2 consumers
//
//     global memory              shared memory                   registers
//
//     x, projected  ---TMA--->  strip ring, C x 2  -----+
//     kernel,                       |      ^            |
//     shortcut      ---TMA--->  weight ring, --------+  |
//                               up to 16 stages      |  |
//                                   v      |         v  v
//       producer:               activation c:      consumer c:     mainloop (wgmma),
//       warpgroup C,            warpgroup C+1+c,   warpgroup c     then the epilogue:
//       one thread              in place; only       |             + shift, + residual, round
//                               if kActivated        v
//     residual      ---TMA--->  output buffer c  <--stmatrix
//     y             <--TMA----  output buffer c             (both copies by thread 0 of consumer c)
//
// Barriers (mbarrier). A phase completes after the given number of arrivals and, for "+ bytes",
// once TMA has written the bytes that the arrival announced. Parities alternate from 0; a wait for
// parity 1 returns at once in the first round. [c]: consumer; [2]: slot of the strip ring; [s]:
// stage of the weight ring.
//
//     barrier           waits                  arrives (arrivals)           parity waited for
//     strip_full[c][2]  activation c, else     producer (1 + bytes of       0, flips when the ring
//                       consumer c             the box)                     wraps
//     strip_ready[c][2] consumer c;            activation c (128)           as strip_full
//                       only if kActivated
//     strip_empty[c][2] producer               lane 0 of each warp of       1, flips when the ring
//                                              consumer c (4)               wraps
//     weights_full[s]   all consumers          producer (1 + bytes of       0, flips when the ring
//                                              the weights)                 wraps; resident: 0
//     weights_empty[s]  producer               lane 0 of each warp of all   1, flips when the ring
//                                              consumers (4 C); resident:   wraps
//                                              none
//     residual_full[c]  consumer c             thread 0 of consumer c       0, flips every tile
//                                              (1 + bytes of the residual)
//     tile_drawn[4]     consumers, activation  producer (1), once it has    0, flips when the ring
//                                              written tiles[4]             wraps
//     turn[c]           consumer c             the other consumer (128);    0, flips every chunk
//                                              at the start, consumer 1
//                                              arrives at turn[0]
//
// Nobody signals that an entry of the ring of drawn tiles is free: the strip ring lets the producer
// run at most two chunks ahead, so it overwrites only a tile that all roles have read.
//
// If all weights fit in the weight ring, they are resident: they are loaded for the first tile and
// stay. Two consumers with resident weights alternate chunk by chunk (ping-pong, barrier `turn`),
// so that the epilogue of one overlaps the wgmmas of the other. A consumer releases a strip or a
// stage one step late, after it has issued the next wgmmas, so that the tensor cores always have
// work.
//
// Named barrier 1 + c, the 128 threads of consumer c: (1) before the epilogue writes the output
// buffer, thread 0 has waited until the last TMA store has read it (with a residual, thread 0 waits
// before it loads the residual into the buffer, and residual_full signals the others); (2) before
// the next TMA store, all threads have written. Named barrier 1 + C + r: role r waits until all
// threads have initialised the mbarriers.
//
// Shared memory, in this order, each beginning at a multiple of 1024 bytes:
//
//     strips    C x 2 x kStripBytes   a haloed strip of 64 channels: 128 bytes per pixel, swizzled
//     outputs   C x kOutputBytes      features / 64 boxes of a strip; first holds the residual
//     barriers  kBarrierBytes         strip_full, strip_ready, strip_empty, residual_full, turn,
//                                     weights_full, weights_empty (these two: kMaxStages each),
//                                     tile_drawn; then tiles, the ring of drawn tiles
//     weights   stages x kStageBytes  weights of `taps` taps x 64 channels x features, swizzled
//
// A block of a small call computes a single tile, in 7,000 to 25,000 cycles. It fetches its
// instructions into an empty cache: those that are executed once take 4 to 9 cycles each (measured
// on an H100). So there are few of them before the first TMA load and in the epilogue.
//
// With Traits::kWide, results are float32: wide_epilogue.cuh replaces the epilogue, and there are
// no output buffers.
#pragma once

#include "common/launch.cuh"
#include "conv3x3/hopper/forward_consumer.cuh"
#include "conv3x3/hopper/forward_producer.cuh"

namespace jaxunet::cuda::forward {

template <class T, class Traits, bool kFlipped>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    hopper_forward_kernel(const __grid_constant__
                          typename Block<T, Traits, kFlipped>::Given parameters) {
#ifdef JAXUNET_SM90A_PASS
  const Block<T, Traits, kFlipped> block(parameters, shared_memory());
  if (threadIdx.x == Traits::kThreads - 1) block.prefetch_maps();
  block.init_barriers();
  const int warpgroup = threadIdx.x / kWarpgroup;
  // With two warpgroups, each thread starts with as many registers as it can use.
  constexpr bool kMovesRegisters = Traits::kWarpgroups > 2;
  // Each role waits in its own code, so that it fetches its first instructions before the wait
  // ends, and at a barrier of its own, at which the other roles only arrive: synccheck reports an
  // error if threads of a block wait for one barrier at different instructions.
  constexpr int kRoles = Traits::kActivated ? 3 : 2;
  const auto wait_for_barriers = [](int role) {
#pragma unroll
    for (int other = 0; other < kRoles; ++other) {
      if (other != role) named_barrier_arrive(1 + Traits::kConsumers + other, Traits::kThreads);
    }
    named_barrier_sync(1 + Traits::kConsumers + role, Traits::kThreads);
  };
  if (warpgroup < Traits::kConsumers) {
    if constexpr (kMovesRegisters) set_registers<Traits::kConsumerRegisters, true>();
    wait_for_barriers(0);
    consume(block, warpgroup);
  } else if (warpgroup == Traits::kConsumers) {
    if constexpr (kMovesRegisters) set_registers<Traits::kProducerRegisters, false>();
    wait_for_barriers(1);
    if (threadIdx.x % kWarpgroup == 0) produce(block);
  } else if constexpr (Traits::kActivated) {
    set_registers<Traits::kActivationRegisters, false>();
    wait_for_barriers(2);
    activate(block, warpgroup - Traits::kConsumers - 1);
  }
#else
  __trap();  // never launched: common/device.h
#endif
}

}  // namespace jaxunet::cuda::forward
