// The CPU kernels of all ops, and their shared helpers. They widen to float32, sum in float64 and
// divide their work among the threads of XLA: simple, correct, deterministic and slow, for tests
// and for machines without a GPU.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "adamw/plan.h"
#include "attention/plan.h"
#include "binding/plan.h"
#include "conv3x3/plan.h"
#include "group_norm/plan.h"
#include "linear/plan.h"
#include "projections/plan.h"
#include "weight_gradients/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxunet::cpu {

using Pool = ::xla::ffi::ThreadPool;

// Calls body(i) for each i in [0, count), on the calling thread and on free threads of the pool.
void parallel(Pool& pool, int64_t count, const std::function<void(int64_t)>& body);

// Convert `count` numbers to float32, and back with rounding to nearest even.
std::vector<float> widen(const void* from, Type type, int64_t count);
void narrow(const std::vector<float>& from, Type type, void* to);
// Rounds the values to numbers of a type.
void round_to(Type type, std::vector<float>& values);

// Concatenates the parts along channels into (pixels, channels); `split` is the inverse.
std::vector<float> join(const Parts& parts, Type type, int64_t pixels);
void split(const std::vector<float>& from, Type type, int64_t pixels, const Parts& to);

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// x = SiLU(a · x + b) in place; x is (batch, pixels, channels).
void affine_silu(Pool& pool, std::vector<float>& x, int64_t batch, int64_t channels, const Rows& a,
                 const Rows& b);

// Adds a norm's sums over the samples.
void add_samples(const NormSums& norm);

void sum_of_squares(const SumOfSquares& plan, Pool& pool);
void adamw(const AdamW& plan, Pool& pool);
void narrow_all(const Narrow& plan, Pool& pool);
void pack(const Pack& plan, Pool& pool);
void attention_forward(const AttentionForward& plan, Pool& pool);
void attention_backward(const AttentionBackward& plan, Pool& pool);
void conv3x3(const Conv3x3& plan, Pool& pool);
void conv3x3_shortcut_gradient(const Conv3x3& plan, Pool& pool);
void conv3x3_upsampled(const UpsampledConv3x3& plan, Pool& pool);
void conv3x3_weight_gradient(const Conv3x3WeightGradient& plan, Pool& pool);
void conv3x3_upsampled_weight_gradient(const UpsampledWeightGradient& plan, Pool& pool);
void linear(const Conv3x3& plan, Pool& pool);
void linear_weight_gradient(const Conv3x3WeightGradient& plan, Pool& pool);
void weight_gradients(const WeightGradients& plan, Pool& pool);
void projections(const Projections& plan, Pool& pool);
void projection_gradients(const ProjectionGradients& plan, Pool& pool);
void norm_forward(const NormForward& plan, Pool& pool);
void norm_dropout_forward(const NormForward& plan, Pool& pool);
void norm_statistics(const NormStatistics& plan, Pool& pool);
void norm_gradient(const NormGradient& plan, Pool& pool);
void norm_dropout_gradient(const NormGradient& plan, Pool& pool);

}  // namespace jaxunet::cpu
