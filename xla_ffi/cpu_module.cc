#include "cpu.h"
#include "group_norm/flow.h"
#include "group_norm/slab.h"
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

// How the CUDA kernels cut a GroupNorm: for tests.
pybind11::dict group_norm_slab(int64_t batch, int64_t pixels, int64_t channels, int64_t group, int vector, int element,
                               int arrays, int threads, int64_t processors, int64_t shared, int cluster) {
  const Need need{arrays, threads, 16, 48};  // at least as much scratch as the kernels need
  const Limits limits{processors, shared, cluster};
  const Slab slab = cut_slab(limits, need, batch, pixels, channels, group, vector, element);
  check(slab, limits);
  pybind11::dict found;
  found["channels"] = slab.vectors * vector;
  found["lanes"] = 1 << slab.lane_bits;
  found["tiles"] = slab.tiles;
  found["rows"] = 1 << slab.row_bits;
  found["piece"] = 1 << slab.piece_bits;
  found["share"] = slab.share;
  found["ranks"] = slab.ranks;
  found["depth"] = slab.depth;
  found["chunks"] = slab.chunks;
  found["blocks"] = slab.blocks;
  found["threads"] = slab.threads;
  found["bytes"] = slab.held + slab.scratch;
  return found;
}

// The same for large images, first of the kernel that sums, then of the one that writes; none where a slab is taken.
pybind11::object group_norm_flow(int64_t least, int64_t batch, int64_t pixels, int64_t channels, int64_t group,
                                 int vector, int element, int64_t processors, int64_t shared, int cluster) {
  const Limits limits{processors, shared, cluster};
  const Flow flow = cut_flow(limits, least, batch, pixels, channels, group, vector, element);
  if (flow.blocks == 0) return pybind11::none();
  pybind11::dict found;
  found["channels"] = flow.vectors * vector;
  found["rows"] = flow.rows;
  found["threads"] = kFlowThreads;
  found["ranks"] = flow.ranks;
  found["blocks"] = flow.blocks;
  found["piece"] = 1 << flow.piece_bits;
  found["ranks_back"] = respread(flow, limits, batch).ranks;
  return found;
}

}  // namespace
}  // namespace jaxunet

PYBIND11_MODULE(_cpu, module) {
  module.def("registrations", &jaxunet::registrations, "Target name -> handler capsule.");
  module.def("group_norm_slab", &jaxunet::group_norm_slab, "How the CUDA kernels cut a GroupNorm.");
  module.def("group_norm_flow", &jaxunet::group_norm_flow, "How they cut one of large images; None where they do not.");
}
