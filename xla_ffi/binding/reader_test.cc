// Calls that no test in Python can make: images of more pixels than a machine has memory for, and
// addresses that XLA never passes. Prints the reader's message for each, for
// xla_ffi/test_reader.py.

#include "binding/reader.h"

#include <algorithm>
#include <iostream>

#include "adamw/plan.h"
#include "attention/plan.h"
#include "conv3x3/plan.h"
#include "group_norm/plan.h"
#include "linear/plan.h"

namespace jaxunet {
namespace {

// An operand or a result. Nothing reads its data, so the address need not exist.
struct Tensor {
  XLA_FFI_DataType type;
  Dims dims;
  uintptr_t address = 4096;
};

Tensor bfloat16(Dims dims, uintptr_t address = 4096) {
  return {XLA_FFI_DataType_BF16, std::move(dims), address};
}
Tensor float32(Dims dims, uintptr_t address = 4096) {
  return {XLA_FFI_DataType_F32, std::move(dims), address};
}

struct Attribute {
  std::string name;
  XLA_FFI_DataType type;
  int64_t integer;
  float number;
};

Attribute integer(const char* name, int64_t value) {
  return {name, XLA_FFI_DataType_S64, value, 0};
}
Attribute flag(const char* name, bool value) { return {name, XLA_FFI_DataType_PRED, value, 0}; }
Attribute number(const char* name, float value) { return {name, XLA_FFI_DataType_F32, 0, value}; }

// The arrays of a call in XLA's form.
struct Buffers {
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> addresses;

  explicit Buffers(std::vector<Tensor>& tensors) {
    for (Tensor& tensor : tensors) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, tensor.type,
                         reinterpret_cast<void*>(tensor.address),
                         static_cast<int64_t>(tensor.dims.size()), tensor.dims.data()});
    }
    for (XLA_FFI_Buffer& buffer : buffers) addresses.push_back(&buffer);
  }
  int64_t size() const { return static_cast<int64_t>(buffers.size()); }
};

// Prints what `read` says about a call.
template <class Read>
void tell(const char* op, Read read, std::vector<Tensor> operands, std::vector<Tensor> results,
          std::vector<Attribute> attributes) {
  Buffers given(operands), wanted(results);
  // XLA expects attributes sorted by name, because it finds them by bisection.
  std::sort(attributes.begin(), attributes.end(),
            [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
  std::vector<XLA_FFI_ArgType> arg_types(operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(results.size(), XLA_FFI_RetType_BUFFER);
  const XLA_FFI_Args args{XLA_FFI_Args_STRUCT_SIZE, nullptr, given.size(), arg_types.data(),
                          given.addresses.data()};
  const XLA_FFI_Rets rets{XLA_FFI_Rets_STRUCT_SIZE, nullptr, wanted.size(), ret_types.data(),
                          wanted.addresses.data()};
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan> spans;
  for (Attribute& attribute : attributes) {
    void* value = attribute.type == XLA_FFI_DataType_F32 ? static_cast<void*>(&attribute.number)
                                                         : &attribute.integer;
    scalars.push_back({attribute.type, value});
    spans.push_back({attribute.name.data(), attribute.name.size()});
  }
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
  for (size_t i = 0; i < attributes.size(); ++i) {
    names.push_back(&spans[i]);
    values.push_back(&scalars[i]);
  }
  std::vector<XLA_FFI_AttrType> attr_types(attributes.size(), XLA_FFI_AttrType_SCALAR);
  const XLA_FFI_Attrs attrs{
      XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(attributes.size()),
      attr_types.data(),         names.data(), values.data()};
  try {
    Reader call(op, ffi::RemainingArgs(&args, 0), ffi::RemainingRets(&rets, 0),
                ffi::Dictionary(&attrs));
    read(call);
    call.finish();
    std::cout << op << ": read\n";
  } catch (const InvalidCall& invalid) {
    std::cout << invalid.what() << "\n";
  }
}

void convolution(Dims image, uintptr_t x = 4096, uintptr_t y = 4096) {
  Dims x_dims = image, y_dims = image;
  x_dims.push_back(8);
  y_dims.push_back(16);
  tell("conv", read_conv3x3, {bfloat16(x_dims, x), bfloat16({3, 3, 8, 16}), float32({1, 16})},
       {bfloat16(y_dims, y)},
       {integer("parts", 1), flag("flipped", false), integer("residuals", 0), flag("shift", true),
        flag("shortcut", false), flag("activation", false)});
}

void linear(Dims image) {
  Dims x_dims = image, y_dims = image;
  x_dims.push_back(8);
  y_dims.push_back(16);
  tell("linear", read_linear, {bfloat16(x_dims), bfloat16({8, 16}), float32({1, 16})},
       {bfloat16(y_dims)}, {flag("residual", false)});
}

void norm(int64_t batch, int64_t height, int64_t width) {
  const Tensor row = float32({1, 8}), rows = float32({batch, 8});
  tell("norm", read_norm_statistics, {bfloat16({batch, height, width, 8}), row, row},
       {rows, rows, rows, rows}, {integer("parts", 1), integer("groups", 2), number("eps", 1e-5f)});
}

void attention(int64_t batch, int64_t tokens) {
  tell("attention", read_attention_forward, {bfloat16({batch, tokens, 48})},
       {bfloat16({batch, tokens, 16}), float32({batch, 2, tokens})}, {integer("heads", 2)});
}

void attention_gradient(int64_t batch, int64_t tokens) {
  const Tensor qkv = bfloat16({batch, tokens, 48}), out = bfloat16({batch, tokens, 16});
  tell("attention gradient", read_attention_backward, {qkv, out, float32({batch, 2, tokens}), out},
       {qkv}, {integer("heads", 2)});
}

void sums(int64_t elements, int64_t chunk) {
  tell("sums", read_sum_of_squares, {float32({elements})},
       {float32({(elements + chunk - 1) / chunk})},
       {integer("chunk", chunk), integer("tensors", 1)});
}

void adamw(int64_t elements) {
  const Tensor each = float32({elements});
  tell("adamw", read_adamw, {float32({5}), each, each, each, each}, {each, each, each},
       {number("b1", 0), number("b2", 0), number("rest1", 1), number("rest2", 1), number("eps", 1),
        number("decay", 0), integer("averages", 0), integer("tensors", 1), integer("packed", 0),
        flag("copies", false)});
}

// Two tensors of 40 and 8 elements, whose gradients lie in arrays of these sizes.
void packed_adamw(std::vector<int64_t> sizes) {
  std::vector<Tensor> operands{float32({5})}, results;
  for (const int64_t size : sizes) operands.push_back(float32({size}));
  for (int array = 0; array < 3; ++array) {
    for (const Tensor& tensor : {float32({5, 8}), float32({8})}) {
      operands.push_back(tensor);
      results.push_back(tensor);
    }
  }
  tell("packed adamw", read_adamw, operands, results,
       {number("b1", 0), number("b2", 0), number("rest1", 1), number("rest2", 1), number("eps", 1),
        number("decay", 0), integer("averages", 0), integer("tensors", 2),
        integer("packed", static_cast<int64_t>(sizes.size())), flag("copies", false)});
}

void narrow(int64_t elements) {
  tell("narrow", read_narrow_all, {float32({elements}), float32({8})},
       {bfloat16({elements}), bfloat16({8})}, {integer("tensors", 2)});
}

void tell_all() {
  convolution({2, 4, 4});
  convolution({1, 65536, 32704});
  convolution({2, 32768, 32768});
  linear({1, 65536, 32704});
  linear({32768, 65536, 1});
  norm(65535, 1, 1);
  norm(65536, 1, 1);
  norm(1, 65536, 32768);
  attention(1, 1073739776);
  attention(32768, 32768);
  attention_gradient(32768, 32768);
  sums(int64_t{1} << 40, 1 << 14);
  sums((int64_t{1} << 40) + 1, 1 << 14);
  sums(int64_t{1} << 31, 1);
  adamw(int64_t{1} << 40);
  adamw((int64_t{1} << 40) + 1);
  packed_adamw({96});
  packed_adamw({64, 32});
  packed_adamw({64});
  packed_adamw({95});
  packed_adamw({128});
  packed_adamw({64, 64});
  packed_adamw({96, 32});
  narrow((int64_t{1} << 40) - 8);
  narrow(int64_t{1} << 40);
  convolution({2, 4, 4}, 4096 + 8);
  convolution({2, 4, 4}, 4096, 4096 + 2);
}

}  // namespace
}  // namespace jaxunet

int main() { jaxunet::tell_all(); }
