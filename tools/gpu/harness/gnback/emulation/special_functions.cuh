// Replaces xla_ffi/common/special_functions.cuh for emulate.cc.
#pragma once
#include <cmath>
namespace jaxunet::cuda {
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
inline float power_of_two(float x) { return exp2f(x); }
inline float fast_tanh(float x) { return tanhf(x); }
inline float reciprocal(float x) { return 1.0f / x; }
}  // namespace jaxunet::cuda
