// A linear layer over the channels of an image: y = x · kernel + bias [+ residual].
//
// It is a convolution without taps: a Conv3x3 with an empty x, whose `projected` is the layer's
// input and whose shortcut is its kernel. So it runs on the convolution's kernels, with only the
// projected channels as K.
#pragma once

#include "conv3x3/plan.h"

namespace jaxunet {

class Reader;

Conv3x3 read_linear(Reader& call);
Conv3x3WeightGradient read_linear_weight_gradient(Reader& call);
// The same without a workspace, for calls of several weight gradients.
Conv3x3WeightGradient read_linear_weight_gradient_member(Reader& call);

}  // namespace jaxunet
