// Reads and checks the operands, results and attributes of a call, for the CPU and the CUDA module.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "binding/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxunet {

namespace ffi = ::xla::ffi;

// The caller's operands, results or attributes are wrong; the handler makes it an XLA error.
struct InvalidCall : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

using Dims = std::vector<int64_t>;

constexpr int64_t kAny = -1;  // a dimension of any size

// Most pixels of a batch of images, and most queries over all heads: the kernels count them as int,
// rounded up to whole tiles. jaxunet/ops/checks.py has the same limit.
constexpr int64_t kMaxPixels = (int64_t{1} << 31) - 4096;

// Operands and results are aligned to this many bytes: kernels load 16 bytes at once, and TMA
// requires it.
constexpr uintptr_t kAlignment = 16;

struct Array {
  void* data;
  ffi::DataType element;
  Dims dims;
};

// Takes operands and results in order. Methods throw InvalidCall, which names the op, the array,
// and what was expected and found.
class Reader {
 public:
  Reader(std::string_view op, ffi::RemainingArgs operands, ffi::RemainingRets results,
         ffi::Dictionary attributes)
      : op_(op), operands_(operands), results_(results), attributes_(attributes) {}

  // The next operand: float32, float16 or bfloat16, with at least `rank` dimensions.
  Array floating(const std::string& name, size_t rank);
  // The next operand or result, of this type and shape (kAny: any size).
  Array operand(const std::string& name, ffi::DataType element, const Dims& expected);
  Array result(const std::string& name, ffi::DataType element, const Dims& expected);
  // The next operand or result, of one of two types.
  Array operand(const std::string& name, ffi::DataType one, ffi::DataType other,
                const Dims& expected);
  Array result(const std::string& name, ffi::DataType one, ffi::DataType other,
               const Dims& expected);

  // `count` operands (results) that differ only in their last dimension; the first decides the
  // type, unless `element` does.
  Parts parts(const std::string& name, int64_t count, Array* first);
  Parts parts(const std::string& name, int64_t count, ffi::DataType element, const Dims& leading);
  Parts result_parts(const std::string& name, int64_t count, ffi::DataType element,
                     const Dims& leading);
  // The next operand: float32, (1 or batch, channels).
  Rows rows(const std::string& name, int64_t batch, int64_t channels);

  // The attribute of this name: an integer from `low` to `high`, a float32, or a bool.
  int64_t integer(const char* name, int64_t low,
                  int64_t high = std::numeric_limits<int32_t>::max());
  float number(const char* name);
  bool flag(const char* name);
  // Goes on with member `index` of a call that consists of several: the names of its attributes end
  // in _index.
  void member(int64_t index);
  // Goes on with what all members share.
  void shared();
  // The attribute `kernels`, which any call may have.
  KernelSet kernels();

  // Checks that the call has no operands, results or attributes that have not been read.
  void finish();

  // Checks that `name` has at most `most` of `unit`, such as pixels.
  void at_most(const std::string& name, const std::string& unit, int64_t found, int64_t most) const;

  [[noreturn]] void fail(const std::string& message) const;

 private:
  Array next_operand(const std::string& name);
  Array next_result(const std::string& name);
  Array aligned(const std::string& name, const ffi::AnyBuffer& buffer) const;
  template <class Next>
  Parts gather(const std::string& name, int64_t count, const Dims& leading, Next next);
  void check(const std::string& name, const Array& found, ffi::DataType element,
             const Dims& expected) const;

  template <class Value>
  Value attribute(const char* name, const char* expected);

  std::string op_;
  std::string member_, suffix_;  // of the current member: for messages, for attributes
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  size_t operand_ = 0, result_ = 0, attribute_ = 0;
};

// The Type of a floating-point array.
Type kind(ffi::DataType element);

}  // namespace jaxunet
