#include "cpu.h"
#include "handler.h"

namespace jaxunet {
namespace {

template <const char* op, auto read, auto run>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* const bound = ffi::Ffi::Bind()
                                 .Ctx<ffi::ThreadPool>()
                                 .RemainingArgs()
                                 .RemainingRets()
                                 .Attrs()
                                 .To([](ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                        ffi::Dictionary attributes) {
                                   return checked(op, operands, results, attributes, read, [&](const auto& plan) {
                                     run(plan, pool);
                                     return ffi::Error::Success();
                                   });
                                 })
                                 .release();
  return bound->Call(frame);
}

constexpr char kSumOfSquares[] = "jaxunet_sum_of_squares";
constexpr char kAdamW[] = "jaxunet_adamw";
constexpr char kAttentionForward[] = "jaxunet_attention_forward";
constexpr char kAttentionBackward[] = "jaxunet_attention_backward";
constexpr char kConv3x3[] = "jaxunet_conv3x3";
constexpr char kConv3x3WeightGradient[] = "jaxunet_conv3x3_weight_gradient";
constexpr char kNormForward[] = "jaxunet_group_norm_forward";
constexpr char kNormStatistics[] = "jaxunet_group_norm_statistics";
constexpr char kNormApply[] = "jaxunet_group_norm_apply";
constexpr char kNormGradient[] = "jaxunet_group_norm_gradient";

pybind11::dict registrations() {
  pybind11::dict all;
  all[kSumOfSquares] = capsule(handler<kSumOfSquares, read_sum_of_squares, cpu::sum_of_squares>);
  all[kAdamW] = capsule(handler<kAdamW, read_adamw, cpu::adamw>);
  all[kAttentionForward] = capsule(handler<kAttentionForward, read_attention_forward, cpu::attention_forward>);
  all[kAttentionBackward] = capsule(handler<kAttentionBackward, read_attention_backward, cpu::attention_backward>);
  all[kConv3x3] = capsule(handler<kConv3x3, read_conv3x3, cpu::conv3x3>);
  all[kConv3x3WeightGradient] =
      capsule(handler<kConv3x3WeightGradient, read_conv3x3_weight_gradient, cpu::conv3x3_weight_gradient>);
  all[kNormForward] = capsule(handler<kNormForward, read_norm_forward, cpu::norm_forward>);
  all[kNormStatistics] = capsule(handler<kNormStatistics, read_norm_statistics, cpu::norm_statistics>);
  all[kNormApply] = capsule(handler<kNormApply, read_norm_apply, cpu::norm_apply>);
  all[kNormGradient] = capsule(handler<kNormGradient, read_norm_gradient, cpu::norm_gradient>);
  return all;
}

}  // namespace
}  // namespace jaxunet

PYBIND11_MODULE(_cpu, module) {
  module.def("registrations", &jaxunet::registrations, "Target name -> handler capsule.");
}
