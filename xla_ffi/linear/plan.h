// A linear layer over the channels of an image: y = x · kernel + bias [+ residual].
//
// It is a convolution without taps: a Conv3x3 whose x is empty and whose shortcut is the kernel. So
// it runs on the convolution's kernels (wgmma on Hopper, else the implicit GEMM), and K is only the
// projected channels.
#pragma once

#include "conv3x3/plan.h"

namespace jaxunet {

class Reader;

Conv3x3 read_linear(Reader& call);
Conv3x3WeightGradient read_linear_weight_gradient(Reader& call);

}  // namespace jaxunet
