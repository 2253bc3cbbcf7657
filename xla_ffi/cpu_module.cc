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

pybind11::dict registrations() {
  pybind11::dict all;
#define JAXUNET_REGISTER(TARGET, NAME)                              \
  {                                                                 \
    static constexpr char target[] = #TARGET;                       \
    all[target] = capsule(handler<target, read_##NAME, cpu::NAME>); \
  }
  JAXUNET_HANDLERS(JAXUNET_REGISTER)
#undef JAXUNET_REGISTER
  return all;
}

}  // namespace
}  // namespace jaxunet

PYBIND11_MODULE(_cpu, module) {
  module.def("registrations", &jaxunet::registrations, "Target name -> handler capsule.");
}
