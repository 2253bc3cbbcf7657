// The reader of calls; reader.h describes it.
#include "binding/reader.h"

#include <sstream>

namespace jaxunet {
namespace {

std::string text(ffi::DataType element) {
  std::ostringstream out;
  out << element;
  return out.str();
}

std::string text(const Dims& dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    out += (i ? ", " : "") + (dims[i] == kAny ? std::string("any") : std::to_string(dims[i]));
  }
  return out + "]";
}

// True if the dimensions are as expected; kAny fits any size.
bool fits(const Dims& found, const Dims& expected) {
  if (found.size() != expected.size()) return false;
  for (size_t i = 0; i < found.size(); ++i) {
    if (expected[i] != kAny && found[i] != expected[i]) return false;
  }
  return true;
}

Array describe(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), buffer.element_type(), Dims(dims.begin(), dims.end())};
}

bool is_floating(ffi::DataType element) {
  return element == ffi::DataType::F32 || element == ffi::DataType::F16 ||
         element == ffi::DataType::BF16;
}

}  // namespace

Type kind(ffi::DataType element) {
  return element == ffi::DataType::F32   ? Type::kFloat32
         : element == ffi::DataType::F16 ? Type::kFloat16
                                         : Type::kBfloat16;
}

void Reader::fail(const std::string& message) const {
  throw InvalidCall(op_ + ": " + member_ + message);
}

Array Reader::next_operand(const std::string& name) {
  if (operand_ >= operands_.size()) {
    fail(name + ": missing; the call has " + std::to_string(operands_.size()) + " operands");
  }
  auto buffer = operands_.get<ffi::AnyBuffer>(operand_++);
  if (!buffer.has_value()) fail(name + ": " + buffer.error().message());
  return aligned(name, *buffer);
}

Array Reader::aligned(const std::string& name, const ffi::AnyBuffer& buffer) const {
  const uintptr_t past = reinterpret_cast<uintptr_t>(buffer.untyped_data()) % kAlignment;
  if (past) {
    fail(name + ": expected an address that is a multiple of " + std::to_string(kAlignment) +
         ", found one " + std::to_string(past) + " bytes past; copy the array");
  }
  return describe(buffer);
}

void Reader::at_most(const std::string& name, const std::string& unit, int64_t found,
                     int64_t most) const {
  if (found > most) {
    fail(name + ": expected at most " + std::to_string(most) + " " + unit + ", found " +
         std::to_string(found));
  }
}

void Reader::check(const std::string& name, const Array& found, ffi::DataType element,
                   const Dims& expected) const {
  if (found.element != element || !fits(found.dims, expected)) {
    fail(name + ": expected " + text(element) + text(expected) + ", found " + text(found.element) +
         text(found.dims));
  }
}

Array Reader::floating(const std::string& name, size_t rank) {
  Array found = next_operand(name);
  if (!is_floating(found.element) || found.dims.size() < rank) {
    fail(name + ": expected float32, float16 or bfloat16 of at least " + std::to_string(rank) +
         " dimensions, found " + text(found.element) + text(found.dims));
  }
  return found;
}

Array Reader::operand(const std::string& name, ffi::DataType element, const Dims& expected) {
  Array found = next_operand(name);
  check(name, found, element, expected);
  return found;
}

Array Reader::operand(const std::string& name, ffi::DataType one, ffi::DataType other,
                      const Dims& expected) {
  Array found = next_operand(name);
  check(name, found, found.element == other ? other : one, expected);
  return found;
}

Array Reader::next_result(const std::string& name) {
  if (result_ >= results_.size())
    fail(name + ": missing; the call has " + std::to_string(results_.size()) + " results");
  auto buffer = results_.get<ffi::AnyBuffer>(result_++);
  if (!buffer.has_value()) fail(name + ": " + buffer.error().message());
  return aligned(name, **buffer);
}

Array Reader::result(const std::string& name, ffi::DataType element, const Dims& expected) {
  Array found = next_result(name);
  check(name, found, element, expected);
  return found;
}

Array Reader::result(const std::string& name, ffi::DataType one, ffi::DataType other,
                     const Dims& expected) {
  Array found = next_result(name);
  check(name, found, found.element == other ? other : one, expected);
  return found;
}

Parts Reader::parts(const std::string& name, int64_t count, Array* first) {
  *first = floating(name + "[0]", 4);
  check(name + "[0]", *first, first->element, {kAny, kAny, kAny, kAny});
  Parts all{1, {first->data}, {first->dims[3]}, first->dims[3]};
  const Parts rest =
      parts(name, count - 1, first->element, {first->dims.begin(), first->dims.end() - 1});
  for (int i = 0; i < rest.count; ++i, ++all.count) {
    all.data[all.count] = rest.data[i];
    all.channels[all.count] = rest.channels[i];
  }
  all.total += rest.total;
  return all;
}

template <class Next>
Parts Reader::gather(const std::string& name, int64_t count, const Dims& leading, Next next) {
  Dims expected = leading;
  expected.push_back(kAny);
  Parts all;
  for (int64_t i = 0; i < count; ++i, ++all.count) {
    const Array part = next(name + "[" + std::to_string(i) + "]", expected);
    all.data[all.count] = part.data;
    all.total += all.channels[all.count] = part.dims.back();
  }
  return all;
}

Parts Reader::parts(const std::string& name, int64_t count, ffi::DataType element,
                    const Dims& leading) {
  return gather(name, count, leading, [&](const std::string& part, const Dims& expected) {
    return operand(part, element, expected);
  });
}

Parts Reader::result_parts(const std::string& name, int64_t count, ffi::DataType element,
                           const Dims& leading) {
  return gather(name, count, leading, [&](const std::string& part, const Dims& expected) {
    return result(part, element, expected);
  });
}

Rows Reader::rows(const std::string& name, int64_t batch, int64_t channels) {
  const Array found = operand(name, ffi::DataType::F32, {kAny, channels});
  if (found.dims[0] != 1 && found.dims[0] != batch) {
    fail(name + ": expected 1 or " + std::to_string(batch) + " rows, found " +
         std::to_string(found.dims[0]));
  }
  return {static_cast<const float*>(found.data), found.dims[0] == 1 ? 0 : channels};
}

void Reader::member(int64_t index) {
  member_ = "member " + std::to_string(index) + ": ";
  suffix_ = "_" + std::to_string(index);
}

void Reader::shared() {
  member_.clear();
  suffix_.clear();
}

template <class Value>
Value Reader::attribute(const char* name, const char* expected) {
  const auto value = attributes_.get<Value>(name + suffix_);
  if (!value.has_value())
    fail(std::string("attribute ") + name + ": expected " + expected + ": " +
         value.error().message());
  ++attribute_;
  return *value;
}

int64_t Reader::integer(const char* name, int64_t low, int64_t high) {
  const int64_t value = attribute<int64_t>(name, "a 64-bit integer");
  if (value < low || value > high) {
    fail(std::string("attribute ") + name + ": expected " + std::to_string(low) + " to " +
         std::to_string(high) + ", found " + std::to_string(value));
  }
  return value;
}

float Reader::number(const char* name) { return attribute<float>(name, "a float32"); }

bool Reader::flag(const char* name) { return attribute<bool>(name, "a bool"); }

KernelSet Reader::kernels() {
  if (!attributes_.contains("kernels")) return KernelSet::kFastest;
  const auto value = attributes_.get<std::string_view>("kernels");
  if (!value.has_value())
    fail(std::string("attribute kernels: expected a string: ") + value.error().message());
  ++attribute_;
  if (*value == "portable") return KernelSet::kPortable;
  if (*value == "ada") return KernelSet::kAda;
  fail("attribute kernels: expected \"portable\" or \"ada\", found \"" + std::string(*value) +
       "\"");
}

void Reader::finish() {
  const auto exact = [this](const char* what, size_t used, size_t given) {
    if (used != given)
      fail(std::to_string(given) + " " + what + " given, " + std::to_string(used) + " expected");
  };
  exact("operands", operand_, operands_.size());
  exact("results", result_, results_.size());
  exact("attributes", attribute_, attributes_.size());
}

}  // namespace jaxunet
