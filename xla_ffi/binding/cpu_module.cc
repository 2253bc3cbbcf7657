// The Python module _cpu: handlers that run on the CPU, and the tilings of the GroupNorm kernels,
// for tests on machines without a GPU.
#include "binding/cpu.h"
#include "binding/handler.h"
#include "group_norm/backward_smem_resident_tiling.h"
#include "group_norm/forward_register_resident_tiling.h"
#include "group_norm/forward_smem_resident_tiling.h"
#include "group_norm/statistics_tiling.h"
#include "group_norm/streaming_tiling.h"

namespace jaxunet {
namespace {

// The handler of one target. Its binding is created at the first call and never destroyed.
template <const char* op, auto read, auto run>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  const auto call = [](ffi::ThreadPool pool, ffi::RemainingArgs operands,
                       ffi::RemainingRets results, ffi::Dictionary attributes) {
    return checked(op, operands, results, attributes, read, [&](const auto& plan, KernelSet) {
      run(plan, pool);
      return ffi::Error::Success();
    });
  };
  static auto* const bound = ffi::Ffi::Bind()
                                 .Ctx<ffi::ThreadPool>()
                                 .RemainingArgs()
                                 .RemainingRets()
                                 .Attrs()
                                 .To(call)
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

// The functions below take a device's multiprocessors (sms), shared memory per block (smem_bytes)
// and largest cluster, 1 if it has no clusters.

// The tiling of the smem_resident GroupNorm kernel of the forward pass.
pybind11::dict group_norm_smem_resident(int64_t batch, int64_t pixels, int64_t channels,
                                        int64_t group, int vector, int element, bool writes_y,
                                        int64_t sms, int64_t smem_bytes, int max_cluster) {
  const DeviceLimits limits{sms, smem_bytes, max_cluster};
  const SmemResidentTiling tiling =
      smem_resident_tiling(limits, writes_y, batch, pixels, channels, group, vector, element);
  check(tiling, limits);
  pybind11::dict found;
  found["channels"] = tiling.vectors * vector;
  found["lanes"] = 1 << tiling.lane_bits;
  found["warp_columns"] = tiling.warp_columns;
  found["rows"] = 1 << tiling.row_bits;
  found["piece"] = 1 << tiling.piece_bits;
  found["block_pixels"] = tiling.block_pixels;
  found["ranks"] = tiling.cluster_size;
  found["chunk_steps"] = tiling.chunk_steps;
  found["chunks"] = tiling.chunks;
  found["channel_blocks"] = tiling.channel_blocks;
  found["threads"] = tiling.threads;
  found["bytes"] = tiling.stage_bytes + tiling.scratch_bytes;
  return found;
}

// The tiling of the smem_resident GroupNorm kernel of the backward pass.
pybind11::dict group_norm_backward(int64_t batch, int64_t pixels, int64_t channels, int64_t group,
                                   int vector, int element, int added, int64_t sms,
                                   int64_t smem_bytes, int max_cluster) {
  const DeviceLimits limits{sms, smem_bytes, max_cluster};
  const BackwardTiling tiling =
      backward_tiling(limits, batch, pixels, channels, group, vector, element, added);
  check(tiling, limits);
  pybind11::dict found;
  found["channels"] = tiling.vectors * vector;
  found["rows"] = tiling.rows;
  found["ranks"] = tiling.ranks;
  found["chunk_steps"] = tiling.chunk_steps;
  found["chunks"] = tiling.chunks;
  found["channel_blocks"] = tiling.channel_blocks;
  found["threads"] = tiling.threads;
  found["team"] = 1 << tiling.team_bits;
  found["keep"] = tiling.keep;
  found["stage_bytes"] = tiling.stage_bytes;
  found["scratch_bytes"] = tiling.scratch_bytes;
  return found;
}

// True if the backward pass takes the smem_resident kernel although the streaming kernels could
// run, too. Added tensors make no difference.
bool group_norm_faster_than_streaming(int64_t batch, int64_t pixels, int64_t channels,
                                      int64_t group, int vector, int element, int64_t sms,
                                      int64_t smem_bytes, int max_cluster) {
  const DeviceLimits limits{sms, smem_bytes, max_cluster};
  return faster_than_streaming(
      backward_tiling(limits, batch, pixels, channels, group, vector, element, 0), limits, element);
}

// The tiling of the streaming GroupNorm kernels; None if they are not used.
pybind11::object group_norm_streaming(int64_t min_elements, int64_t batch, int64_t pixels,
                                      int64_t channels, int64_t group, int vector, int element,
                                      int64_t sms, int64_t smem_bytes, int max_cluster) {
  const DeviceLimits limits{sms, smem_bytes, max_cluster};
  const auto tiling =
      streaming_tiling(limits, min_elements, batch, pixels, channels, group, vector, element);
  if (!tiling) return pybind11::none();
  pybind11::dict found;
  found["channels"] = tiling->vectors * vector;
  found["rows"] = tiling->rows;
  found["threads"] = kStreamingThreads;
  found["ranks"] = tiling->ranks;
  found["channel_blocks"] = tiling->channel_blocks;
  found["piece"] = 1 << tiling->piece_bits;
  const StreamingTiling second = second_pass_tiling(*tiling, limits, batch);
  found["second_pass_channels"] = second.vectors * vector;
  found["second_pass_ranks"] = second.ranks;
  return found;
}

// The fields of a block that loads into registers.
pybind11::dict found_block(const BlockReduction& block, int vector) {
  pybind11::dict found;
  found["channels"] = block.vectors * vector;
  found["rows"] = block.rows;
  found["threads"] = threads_of(block);
  found["groups"] = block.groups;
  found["piece"] = 1 << block.piece_bits;
  found["team"] = 1 << block.team_bits;
  found["entries"] = block.row_entries;
  return found;
}

// The fields of a tiling of the register_resident GroupNorm kernel; None if it is not used.
pybind11::object found_registers(const std::optional<RegisterResidentTiling>& tiling,
                                 const DeviceLimits& limits, int vector, int element) {
  if (!tiling) return pybind11::none();
  pybind11::dict found = found_block(tiling->block, vector);
  found["ranks"] = tiling->ranks;
  found["channel_blocks"] = tiling->channel_blocks;
  found["thread_pixels"] = tiling->thread_pixels;
  found["each"] = tiling->each;
  found["rest"] = tiling->rest;
  found["bytes"] = tiling->smem_bytes;
  found["faster_than_streaming"] = faster_than_streaming(*tiling, limits, vector, element);
  return found;
}

pybind11::object group_norm_register_resident(int64_t batch, int64_t pixels, int64_t channels,
                                              int64_t group, int vector, int element, int64_t sms,
                                              int64_t smem_bytes, int max_cluster) {
  const DeviceLimits limits{sms, smem_bytes, max_cluster};
  return found_registers(
      register_resident_tiling(limits, batch, pixels, channels, group, vector, element), limits,
      vector, element);
}

pybind11::object group_norm_register_resident_cluster(int64_t pixels, int64_t channels,
                                                      int64_t group, int vector, int element,
                                                      int64_t sms, int64_t smem_bytes,
                                                      int max_cluster) {
  const DeviceLimits limits{sms, smem_bytes, max_cluster};
  return found_registers(
      register_resident_cluster_tiling(limits, pixels, channels, group, vector, element), limits,
      vector, element);
}

// The tiling of the GroupNorm statistics kernel; None if it is not used.
pybind11::object group_norm_statistics(int64_t batch, int64_t pixels, int64_t channels,
                                       int64_t group, int vector, int element, int64_t sms,
                                       int64_t smem_bytes, int max_cluster) {
  const auto tiling = statistics_tiling({sms, smem_bytes, max_cluster}, batch, pixels, channels,
                                        group, vector, element);
  if (!tiling) return pybind11::none();
  pybind11::dict found = found_block(tiling->block, vector);
  found["channel_blocks"] = tiling->channel_blocks;
  found["ranks"] = tiling->ranks;
  found["each"] = tiling->each;
  found["rest"] = tiling->rest;
  found["bytes"] = tiling->smem_bytes;
  return found;
}

}  // namespace
}  // namespace jaxunet

PYBIND11_MODULE(_cpu, module) {
  module.def("registrations", &jaxunet::registrations, "Target name -> handler capsule.");
  module.def("group_norm_smem_resident", &jaxunet::group_norm_smem_resident,
             "The tiling of the smem_resident GroupNorm kernel of the forward pass.");
  module.def("group_norm_backward", &jaxunet::group_norm_backward,
             "The tiling of the smem_resident GroupNorm kernel of the backward pass.");
  module.def(
      "group_norm_faster_than_streaming", &jaxunet::group_norm_faster_than_streaming,
      "True if the backward pass takes the smem_resident kernel instead of the streaming ones.");
  module.def("group_norm_streaming", &jaxunet::group_norm_streaming,
             "The tiling of the streaming GroupNorm kernels; None where they are not taken.");
  module.def("group_norm_register_resident", &jaxunet::group_norm_register_resident,
             "The tiling of the register_resident GroupNorm kernel; None where it is not taken.");
  module.def("group_norm_register_resident_cluster", &jaxunet::group_norm_register_resident_cluster,
             "Its tiling with clusters; None where it is not taken.");
  module.def("group_norm_statistics", &jaxunet::group_norm_statistics,
             "The tiling of the GroupNorm statistics kernel; None where it is not taken.");
}
