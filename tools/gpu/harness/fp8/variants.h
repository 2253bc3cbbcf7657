// The variants of kernel.cuh that bench.cu times and emulation/emulate.cc checks.
#pragma once

#include "kernel.cuh"

namespace jaxunet::cuda::fp8 {

// Fills in the strips of a batch of square images.
inline void set_strips(int rows, int batch, int size, Parameters* p) {
  p->strips_across = (size + kColumns - 1) / kColumns;
  p->strips_of_image = p->strips_across * ((size + rows - 1) / rows);
  p->strips = batch * p->strips_of_image;
}

// Calls act(variant, name) for each. The first two use no wgmma and are not timed. Names: tiles of
// 64 pixels per strip; promoted after so many numbers of K; slots of the strip ring; the order of
// the consumers.
template <class Act>
void each_variant(const Act& act) {
  act(Variant<1, kSteps, 3, true, true>(), "scalar, 1 tile");
  act(Variant<2, kSteps, 2, false, true>(), "scalar, 2 tiles");
  act(Variant<1, kSteps, 3, true>(), "1 tile, never, 3 slots, in turns");
  act(Variant<1, kSteps, 5, true>(), "1 tile, never, 5 slots, in turns");
  act(Variant<1, kSteps, 3, false>(), "1 tile, never, 3 slots, free");
  act(Variant<2, kSteps, 2, true>(), "2 tiles, never, 2 slots, in turns");
  act(Variant<2, kSteps, 2, false>(), "2 tiles, never, 2 slots, free");
  act(Variant<1, 18, 3, true>(), "1 tile, every 576, 3 slots, in turns");
  act(Variant<1, 18, 3, false>(), "1 tile, every 576, 3 slots, free");
  act(Variant<2, 18, 2, true>(), "2 tiles, every 576, 2 slots, in turns");
  act(Variant<2, 18, 2, false>(), "2 tiles, every 576, 2 slots, free");
  act(Variant<1, 6, 3, true>(), "1 tile, every 192, 3 slots, in turns");
  act(Variant<1, 6, 3, false>(), "1 tile, every 192, 3 slots, free");
  act(Variant<1, 6, 5, false>(), "1 tile, every 192, 5 slots, free");
  act(Variant<2, 6, 2, true>(), "2 tiles, every 192, 2 slots, in turns");
  act(Variant<2, 6, 2, false>(), "2 tiles, every 192, 2 slots, free");
}

}  // namespace jaxunet::cuda::fp8
