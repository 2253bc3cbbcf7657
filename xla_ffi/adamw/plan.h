// The calls of the handlers that work on many tensors at once: AdamW (Loshchilov & Hutter 2019,
// arXiv 1711.05101, algorithm 2) with averages of the weights, the sum of squares of the gradients,
// copies of the weights in 16 bits, and gradients packed for an all-reduce.
#pragma once

#include <vector>

#include "binding/plan.h"
#include "common/host_device.h"

namespace jaxunet {

class Reader;

// partial[i] = sum of squares of the i-th chunk of `chunk` elements. The chunks of all tensors form
// one sequence; the last chunk of each tensor may be shorter.
struct SumOfSquares {
  int64_t chunk;               // elements
  std::vector<int64_t> sizes;  // elements of each tensor
  std::vector<Type> types;
  std::vector<const void*> tensors;
  float* partial;
};

// Packed gradients (jaxunet/ops/adamw/packed.py) begin at multiples of this many elements.
constexpr int64_t kPackedAlignment = 32;
// The elements that a gradient of `size` elements takes in its packed array.
JAXUNET_HOST_DEVICE constexpr int64_t packed_room(int64_t size) {
  return (size + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

// The arrays of a tensor: indices within its entry of AdamW::arrays.
enum AdamWArray : int { kGradient, kParameter, kFirstMoment, kSecondMoment, kFirstAverage };

// Indices within AdamW::scalars. From kFirstFollow on there is one scalar per average: `follow` in
// the formulas below.
enum AdamWScalar : int { kApplied, kGradientFactor, kLearningRate, kCorrection1, kCorrection2 };
constexpr int64_t kFirstFollow = kCorrection2 + 1;

// One step, in place; nothing changes if scalars[kApplied] is 0. With g = gradient * factor, and
// factor, rate, correction1 and correction2 the scalars kGradientFactor, kLearningRate,
// kCorrection1 and kCorrection2,
//   m = b1 * m + rest1 * g,  v = b2 * v + rest2 * g * g,
//   p -= rate * (m / correction1 / (sqrt(v / correction2) + eps) + decay * p),
//   average += follow * (p - average)  for each average of the weights,
//   copy = p in 16 bits, for the tensors that have a copy.
struct AdamW {
  float b1, b2;
  // 1 - b1 and 1 - b2, computed before b1 and b2 are rounded to float32; afterwards they would be
  // inexact.
  float rest1, rest2;
  float eps, decay;
  int64_t averages;
  std::vector<int64_t> sizes;  // elements of each tensor
  std::vector<Type> types;     // of the gradients: any of the three, in any mixture
  Type copies;                 // of all copies; not read if no tensor has one
  // [tensors][arrays_per_tensor()], in the order of AdamWArray, then the averages, then the copy
  // (null: none); all float32 except the gradients and the copies.
  std::vector<void*> arrays;
  const float* scalars;  // (kFirstFollow + averages), in the order of AdamWScalar

  int64_t copy() const { return kFirstAverage + averages; }  // the index of the copy
  int64_t arrays_per_tensor() const { return copy() + 1; }
};

// Copies of float32 tensors, rounded to 16 bits.
struct Narrow {
  Type type;                        // of the copies
  std::vector<int64_t> sizes;       // elements of each tensor
  std::vector<const void*> arrays;  // [tensors][2]: the float32 tensor, its copy
};

// Gradients one after the other in one array. A gradient takes packed_room(size) elements; those
// after its last one are zeros.
struct Pack {
  Type type;                   // of the packed array: float32 or bfloat16
  std::vector<int64_t> sizes;  // elements of each tensor
  std::vector<Type> types;     // of the tensors: any of the three, in any mixture
  std::vector<void*> arrays;   // [tensors][2]: the tensor, its place in the packed array
};

// Read and check a call; throw InvalidCall where an operand, a result or an attribute is not as
// described above.
SumOfSquares read_sum_of_squares(Reader& call);
AdamW read_adamw(Reader& call);
Narrow read_narrow_all(Reader& call);
Pack read_pack(Reader& call);

}  // namespace jaxunet
