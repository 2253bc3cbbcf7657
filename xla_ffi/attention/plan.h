// Multi-head self-attention on packed qkv, (batch, tokens, 3 · heads · width): all of q, then k, then v, each
// head-major.
#pragma once

#include "../plan.h"

namespace jaxunet {

class Reader;

struct AttentionForward {
  Type type;
  int64_t batch, tokens, heads, width;
  const void* qkv;
  void* out;
  float* norm;  // (batch, heads, tokens): log of the sum of the exponentials of the scaled logits
};

struct AttentionBackward {
  Type type;
  int64_t batch, tokens, heads, width;
  const void *qkv, *out, *grad;
  const float* norm;
  void* dqkv;
};

AttentionForward read_attention_forward(Reader& call);
AttentionBackward read_attention_backward(Reader& call);

}  // namespace jaxunet
