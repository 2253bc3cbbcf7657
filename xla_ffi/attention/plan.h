// The calls of the attention handlers, after their operands have been checked: multi-head
// self-attention on packed qkv,
//   out = softmax(q * k^T / sqrt(width)) * v for each head,
// with qkv (batch, tokens, 3 * heads * width): all of q, then k, then v, each with its heads side
// by side.
#pragma once

#include "binding/plan.h"

namespace jaxunet {

class Reader;

// The arrays in qkv and in its gradient, in order.
enum Qkv : int { kQ, kK, kV };

struct AttentionForward {
  Type type;  // of qkv and out
  int64_t batch, tokens, heads, width;
  const void* qkv;
  void* out;   // (batch, tokens, heads * width)
  float* lse;  // (batch, heads, tokens): log-sum-exp of the scaled logits of a query
};

// The gradient of qkv, given `grad`, the gradient of out.
struct AttentionBackward {
  Type type;  // of qkv, out, grad and dqkv
  int64_t batch, tokens, heads, width;
  const void *qkv, *out, *grad;  // out, grad: (batch, tokens, heads * width)
  const float* lse;              // as the forward pass wrote it
  void* dqkv;                    // the shape of qkv
};

// Read and check a call; throw InvalidCall where an operand, a result or an attribute is not as
// described above.
AttentionForward read_attention_forward(Reader& call);
AttentionBackward read_attention_backward(Reader& call);

}  // namespace jaxunet
