// Reads and checks the calls of the attention handlers: operands, results and attributes in the
// order in which vjp.py passes them. Shared by the CPU and the CUDA build.
#include "binding/reader.h"
#include "plan.h"

namespace jaxunet {
namespace {

// Reads qkv, (..., tokens, 3 * heads * width); all leading dimensions count as batch.
template <class Plan>
Array read_qkv(Reader& call, Plan& plan) {
  const Array qkv = call.floating("qkv", 3);
  const size_t rank = qkv.dims.size();
  plan.type = kind(qkv.element);
  plan.heads = call.integer("heads", 1);
  const int64_t packed = qkv.dims[rank - 1];
  if (packed == 0 || packed % (3 * plan.heads) != 0) {
    call.fail("qkv: " + std::to_string(packed) + " packed channels are not 3 x " +
              std::to_string(plan.heads) + " heads");
  }
  plan.width = packed / (3 * plan.heads);
  constexpr int64_t kMaxWidth = 256;  // per head: what one warp of simple.cu holds
  if (plan.width > kMaxWidth)
    call.fail("qkv: heads of width " + std::to_string(plan.width) + "; expected at most 256");
  plan.tokens = qkv.dims[rank - 2];
  plan.batch = 1;
  for (size_t i = 0; i < rank - 2; ++i) plan.batch *= qkv.dims[i];
  call.at_most("qkv", "queries of all heads", plan.batch * plan.heads * plan.tokens, kMaxPixels);
  plan.qkv = qkv.data;
  return qkv;
}

// Returns `dims` with its last two dimensions replaced.
Dims with_last(Dims dims, std::initializer_list<int64_t> last) {
  dims.resize(dims.size() - 2);
  dims.insert(dims.end(), last);
  return dims;
}

}  // namespace

AttentionForward read_attention_forward(Reader& call) {
  AttentionForward plan{};
  const Array qkv = read_qkv(call, plan);
  plan.out =
      call.result("out", qkv.element, with_last(qkv.dims, {plan.tokens, plan.heads * plan.width}))
          .data;
  plan.lse = static_cast<float*>(
      call.result("lse", ffi::DataType::F32, with_last(qkv.dims, {plan.heads, plan.tokens})).data);
  return plan;
}

AttentionBackward read_attention_backward(Reader& call) {
  AttentionBackward plan{};
  const Array qkv = read_qkv(call, plan);
  const Dims channels = with_last(qkv.dims, {plan.tokens, plan.heads * plan.width});
  plan.out = call.operand("out", qkv.element, channels).data;
  plan.lse = static_cast<const float*>(
      call.operand("lse", ffi::DataType::F32, with_last(qkv.dims, {plan.heads, plan.tokens})).data);
  plan.grad = call.operand("grad", qkv.element, channels).data;
  plan.dqkv = call.result("dqkv", qkv.element, qkv.dims).data;
  return plan;
}

}  // namespace jaxunet
