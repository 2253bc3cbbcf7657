// Stands for xla_ffi/common/special_functions.cuh on the CPU (emulate.cc).
#pragma once
#include <cmath>
namespace jaxunet::cuda {
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
}  // namespace jaxunet::cuda
