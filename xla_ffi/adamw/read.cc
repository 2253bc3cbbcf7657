// Reads and checks the calls of the handlers that work on many tensors at once: operands, results
// and attributes in the order in which update.py, narrow.py and pack.py pass them. Shared by the
// CPU and the CUDA build.
#include "adamw/plan.h"
#include "binding/reader.h"
#include "common/integers.h"

namespace jaxunet {
namespace {

// Number of elements of an array.
int64_t size_of(const Dims& dims) {
  int64_t size = 1;
  for (const int64_t dim : dims) size *= dim;
  return size;
}

// Most elements over all tensors of a call: the kernels count blocks of 4096 elements as int.
constexpr int64_t kMaxElements = int64_t{1} << 40;

// Reads the attribute `tensors`, the number of tensors of a call. It is bounded, because memory is
// reserved for that many tensors before their operands are read.
int64_t read_tensors(Reader& call) {
  constexpr int64_t kMaxTensors = 1 << 16;
  return call.integer("tensors", 1, kMaxTensors);
}

void check_elements(const Reader& call, const std::vector<int64_t>& sizes) {
  int64_t all = 0;
  for (const int64_t size : sizes) all += size;
  call.at_most("all tensors", "elements", all, kMaxElements);
}

// name[i]
std::string numbered(const std::string& name, int64_t i) {
  return name + "[" + std::to_string(i) + "]";
}

// Returns the packed gradient `elements` after the start of an array.
void* packed_at(const Array& packed, int64_t elements) {
  const int64_t bytes = kind(packed.element) == Type::kFloat32 ? 4 : 2;
  return static_cast<char*>(packed.data) + elements * bytes;
}

// Sets the pointers of gradients that fill the arrays `packed`, in the order of the tensors.
void place_packed(Reader& call, const std::vector<Array>& packed, AdamW& plan) {
  size_t array = 0;
  int64_t at = 0;  // in that array
  for (size_t i = 0; i < plan.sizes.size(); ++i) {
    const int64_t room = packed_room(plan.sizes[i]);
    if (room > 0 && at == size_of(packed[array].dims) && array + 1 < packed.size()) {
      ++array;
      at = 0;
    }
    if (at + room > size_of(packed[array].dims)) {
      call.fail(numbered("gradients", array) + ": tensor " + std::to_string(i) +
                " reaches past its end; expected whole tensors");
    }
    plan.types.push_back(kind(packed[array].element));
    plan.arrays[i * plan.arrays_per_tensor() + kGradient] = packed_at(packed[array], at);
    at += room;
  }
  if (array + 1 != packed.size() || at != size_of(packed[array].dims))
    call.fail(numbered("gradients", array) + ": expected no more elements than the tensors take");
}

// Reads the copies of tensors in 16 bits, all of one type; returns the tensors that have one.
std::vector<int64_t> read_copies(Reader& call, const std::vector<Dims>& shapes, AdamW& plan) {
  std::vector<int64_t> found;
  if (!call.flag("copies")) return found;
  for (size_t i = 0; i < shapes.size(); ++i) {
    call.member(i);
    if (!call.flag("copied")) continue;
    call.shared();
    const std::string name = numbered("copies", i);
    const Array copy = call.floating(name, 0);
    if (copy.dims != shapes[i]) call.fail(name + ": expected the shape of its parameter");
    const Type type = kind(copy.element);
    if (type == Type::kFloat32) call.fail(name + ": expected float16 or bfloat16, found float32");
    if (!found.empty() && type != plan.copies)
      call.fail(name + ": expected the type of the first copy, found another");
    plan.copies = type;
    plan.arrays[i * plan.arrays_per_tensor() + plan.copy()] = copy.data;
    found.push_back(static_cast<int64_t>(i));
  }
  call.shared();
  return found;
}

}  // namespace

SumOfSquares read_sum_of_squares(Reader& call) {
  SumOfSquares plan{};
  plan.chunk = call.integer("chunk", 1);
  const int64_t count = read_tensors(call);
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Array found = call.floating(numbered("gradients", i), 0);
    plan.tensors.push_back(found.data);
    plan.types.push_back(kind(found.element));
    plan.sizes.push_back(size_of(found.dims));
    chunks += ceil_div(plan.sizes.back(), plan.chunk);
  }
  check_elements(call, plan.sizes);
  call.at_most("all tensors", "chunks", chunks, std::numeric_limits<int32_t>::max());
  plan.partial = static_cast<float*>(call.result("partial", ffi::DataType::F32, {chunks}).data);
  return plan;
}

AdamW read_adamw(Reader& call) {
  AdamW plan{};
  plan.b1 = call.number("b1");
  plan.b2 = call.number("b2");
  plan.rest1 = call.number("rest1");
  plan.rest2 = call.number("rest2");
  plan.eps = call.number("eps");
  plan.decay = call.number("decay");
  constexpr int64_t kMaxAverages = 64;
  plan.averages = call.integer("averages", 0, kMaxAverages);
  const int64_t count = read_tensors(call), arrays = plan.arrays_per_tensor();
  const int64_t end = plan.copy();  // of the float32 arrays
  plan.scalars = static_cast<const float*>(
      call.operand("scalars", ffi::DataType::F32, {kFirstFollow + plan.averages}).data);
  const auto name = [](int64_t array, int64_t tensor) {
    static const char* const names[] = {"gradients", "params", "mu", "nu"};
    const std::string group =
        array < kFirstAverage ? names[array] : numbered("averages", array - kFirstAverage);
    return numbered(group, tensor);
  };
  std::vector<Dims> shapes;
  plan.arrays.resize(count * arrays);
  const int64_t packed = call.integer("packed", 0);  // arrays of gradients; 0: one per tensor
  std::vector<Array> gradients;
  for (int64_t i = 0; i < packed; ++i) {
    gradients.push_back(
        call.operand(name(kGradient, i), ffi::DataType::F32, ffi::DataType::BF16, {kAny}));
  }
  for (int64_t i = 0; i < count && packed == 0; ++i) {
    const Array found = call.floating(name(kGradient, i), 0);
    shapes.push_back(found.dims);
    plan.types.push_back(kind(found.element));
    plan.arrays[i * arrays + kGradient] = found.data;
  }
  for (int64_t array = kParameter; array < end; ++array) {
    for (int64_t i = 0; i < count; ++i) {
      if (array == kParameter && packed > 0) {
        const Array found = call.floating(name(array, i), 0);
        if (found.element != ffi::DataType::F32) call.fail(name(array, i) + ": expected float32");
        shapes.push_back(found.dims);
        plan.arrays[i * arrays + array] = found.data;
      } else {
        plan.arrays[i * arrays + array] =
            call.operand(name(array, i), ffi::DataType::F32, shapes[i]).data;
      }
    }
  }
  for (const Dims& shape : shapes) plan.sizes.push_back(size_of(shape));
  check_elements(call, plan.sizes);
  if (packed > 0) place_packed(call, gradients, plan);
  const std::vector<int64_t> copied = read_copies(call, shapes, plan);
  const auto aliased = [&](const std::string& of, ffi::DataType element, int64_t array, int64_t i) {
    const std::string which = "new " + of;
    const void* const found = call.result(which, element, shapes[i]).data;
    if (found != plan.arrays[i * arrays + array] && plan.sizes[i])
      call.fail(which + ": expected a result that aliases its operand");
  };
  for (int64_t array = kParameter; array < end; ++array)
    for (int64_t i = 0; i < count; ++i) aliased(name(array, i), ffi::DataType::F32, array, i);
  const auto element = plan.copies == Type::kFloat16 ? ffi::DataType::F16 : ffi::DataType::BF16;
  for (const int64_t i : copied) aliased(numbered("copies", i), element, end, i);
  return plan;
}

Narrow read_narrow_all(Reader& call) {
  Narrow plan{};
  const int64_t count = read_tensors(call);
  std::vector<Dims> shapes;
  plan.arrays.resize(2 * count);
  for (int64_t i = 0; i < count; ++i) {
    const std::string which = numbered("arrays", i);
    const Array found = call.floating(which, 0);
    if (const Type type = kind(found.element); type != Type::kFloat32) {
      call.fail(which + ": expected float32, found " +
                (type == Type::kFloat16 ? "float16" : "bfloat16"));
    }
    shapes.push_back(found.dims);
    plan.sizes.push_back(size_of(found.dims));
    plan.arrays[2 * i] = found.data;
  }
  check_elements(call, plan.sizes);
  ffi::DataType element{};
  for (int64_t i = 0; i < count; ++i) {
    const std::string which = numbered("narrowed", i);
    const Array found = i == 0
                            ? call.result(which, ffi::DataType::F16, ffi::DataType::BF16, shapes[i])
                            : call.result(which, element, shapes[i]);
    element = found.element;
    plan.arrays[2 * i + 1] = found.data;
  }
  plan.type = kind(element);
  return plan;
}

Pack read_pack(Reader& call) {
  Pack plan{};
  const int64_t count = read_tensors(call);
  int64_t room = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Array found = call.floating(numbered("gradients", i), 0);
    plan.types.push_back(kind(found.element));
    plan.sizes.push_back(size_of(found.dims));
    plan.arrays.insert(plan.arrays.end(), {found.data, nullptr});
    room += packed_room(plan.sizes.back());
  }
  check_elements(call, plan.sizes);
  const Array packed = call.result("packed", ffi::DataType::F32, ffi::DataType::BF16, {room});
  plan.type = kind(packed.element);
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    plan.arrays[2 * i + 1] = packed_at(packed, at);
    at += packed_room(plan.sizes[i]);
  }
  return plan;
}

}  // namespace jaxunet
