// The helpers of the CPU kernels: conversions of numbers, and a parallel loop on XLA's threads.
#include "binding/cpu.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>

namespace jaxunet::cpu {
namespace {

// Returns the same bits as another type.
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the types have as many bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

float from_half(uint16_t h) {
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return fraction ? std::nanf("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

uint16_t to_half(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7e00;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00;  // rounds to infinity; the largest is 65504
  // Numbers with exponent e are multiples of 2^(e - 10); zero and numbers below 2^-14 are multiples
  // of 2^-24.
  int exponent;
  std::frexp(size, &exponent);
  const int step = size < 0x1p-14f ? -24 : exponent - 11;
  const auto units = static_cast<uint32_t>(
      std::nearbyint(std::ldexp(size, -step)));  // 2048 carries into the exponent
  return sign | static_cast<uint16_t>(step == -24 ? units : units - 1024 + ((step + 25) << 10));
}

float from_bfloat16(uint16_t b) { return bits<float>(static_cast<uint32_t>(b) << 16); }

uint16_t to_bfloat16(float x) {
  const auto u = bits<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float load(const void* from, Type type, int64_t i) {
  if (type == Type::kFloat32) return static_cast<const float*>(from)[i];
  const uint16_t raw = static_cast<const uint16_t*>(from)[i];
  return type == Type::kFloat16 ? from_half(raw) : from_bfloat16(raw);
}

void store(float x, Type type, void* to, int64_t i) {
  if (type == Type::kFloat32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] = type == Type::kFloat16 ? to_half(x) : to_bfloat16(x);
  }
}

// The work of one call of `parallel`, shared by all threads that take part.
struct Work {
  std::atomic<int64_t> next{0};
  int64_t count = 0, running = 0;                      // total indices; threads that run `body`
  const std::function<void(int64_t)>* body = nullptr;  // valid while an index is left or running
  std::exception_ptr failure;
  std::mutex mutex;
  std::condition_variable idle;

  void run() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (next >= count) return;
      ++running;
    }
    try {
      for (int64_t i; (i = next++) < count;) (*body)(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
      next = count;
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (--running == 0) idle.notify_all();
  }
};

}  // namespace

void parallel(Pool& pool, int64_t count, const std::function<void(int64_t)>& body) {
  // The calling thread works too and waits only for helpers that have begun, so that a pool whose
  // threads all wait here does not deadlock.
  auto work = std::make_shared<Work>();
  work->count = count;
  work->body = &body;
  const int64_t helpers = std::min(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->run(); });
  work->run();
  std::unique_lock<std::mutex> lock(work->mutex);
  work->idle.wait(lock, [&] { return work->running == 0; });
  if (work->failure) std::rethrow_exception(work->failure);
}

std::vector<float> widen(const void* from, Type type, int64_t count) {
  std::vector<float> to(count);
  for (int64_t i = 0; i < count; ++i) to[i] = load(from, type, i);
  return to;
}

void narrow(const std::vector<float>& from, Type type, void* to) {
  for (size_t i = 0; i < from.size(); ++i) store(from[i], type, to, static_cast<int64_t>(i));
}

void round_to(Type type, std::vector<float>& values) {
  for (float& value : values) {
    float bits;
    store(value, type, &bits, 0);
    value = load(&bits, type, 0);
  }
}

std::vector<float> join(const Parts& parts, Type type, int64_t pixels) {
  std::vector<float> to(pixels * parts.total);
  for (int64_t p = 0, i = 0; p < pixels; ++p) {
    for (int part = 0; part < parts.count; ++part) {
      const int64_t n = parts.channels[part];
      for (int64_t c = 0; c < n; ++c) to[i++] = load(parts.data[part], type, p * n + c);
    }
  }
  return to;
}

void split(const std::vector<float>& from, Type type, int64_t pixels, const Parts& to) {
  for (int64_t p = 0, i = 0; p < pixels; ++p) {
    for (int part = 0; part < to.count; ++part) {
      const int64_t n = to.channels[part];
      for (int64_t c = 0; c < n; ++c) store(from[i++], type, to.data[part], p * n + c);
    }
  }
}

void affine_silu(Pool& pool, std::vector<float>& x, int64_t batch, int64_t channels, const Rows& a,
                 const Rows& b) {
  const int64_t pixels = x.empty() ? 0 : static_cast<int64_t>(x.size()) / (batch * channels);
  parallel(pool, batch * pixels, [&](int64_t pixel) {
    const int64_t sample = pixel / pixels;
    for (int64_t c = 0; c < channels; ++c) {
      float& value = x[pixel * channels + c];
      value = a.data[sample * a.stride + c] * value + b.data[sample * b.stride + c];
      value *= sigmoid(value);
    }
  });
}

}  // namespace jaxunet::cpu
