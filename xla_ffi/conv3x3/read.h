// Shared by the readers of convolutions and linear layers.
#pragma once

#include "binding/reader.h"
#include "conv3x3/plan.h"

namespace jaxunet {

template <class Plan>
int64_t pixels(const Plan& plan) {
  return plan.batch * plan.height * plan.width;
}

// Reads the input of a layer without taps, in one array, as `projected`.
template <class Plan>
Array read_projected(Reader& call, const char* name, Plan& plan) {
  Array image;
  plan.projected = call.parts(name, 1, &image);
  plan.type = kind(image.element);
  plan.batch = image.dims[0];
  plan.height = image.dims[1];
  plan.width = image.dims[2];
  call.at_most(name, "pixels", pixels(plan), kMaxPixels);
  return image;
}

// Reads the gradient of a parameter: float32 or `element`, the type of x. `rows` receives its first
// dimension if the shape leaves that open.
inline Result read_gradient(Reader& call, const char* name, ffi::DataType element,
                            const Dims& shape, int64_t* rows = nullptr) {
  const Array found = call.result(name, element, ffi::DataType::F32, shape);
  if (rows) *rows = found.dims[0];
  return {found.data, kind(found.element)};
}

// Reads the gradient of a shift: (plan.shifts, plan.features), plan.shifts 1 or the batch.
template <class Plan>
void read_shift_gradient(Reader& call, ffi::DataType element, Plan& plan) {
  plan.dshift = read_gradient(call, "dshift", element, {kAny, plan.features}, &plan.shifts);
  if (plan.shifts != 1 && plan.shifts != plan.batch) {
    call.fail("dshift: expected 1 or " + std::to_string(plan.batch) + " rows, found " +
              std::to_string(plan.shifts));
  }
}

// Reads the workspace, of at least `minimum` floats.
template <class Plan>
void read_workspace(Reader& call, Plan& plan, int64_t minimum) {
  const Array workspace = call.result("workspace", ffi::DataType::F32, {kAny});
  plan.workspace = static_cast<float*>(workspace.data);
  plan.workspace_floats = workspace.dims[0];
  if (plan.workspace_floats < minimum) {
    call.fail("workspace: expected at least " + std::to_string(minimum) + " numbers, found " +
              std::to_string(plan.workspace_floats));
  }
}

// A layer without taps may process its pixels in any order, as if they formed other images. If
// these are as wide as a strip, the Hopper kernels read no unused columns, and small images fill
// whole strips.
constexpr int64_t kRegroupedColumns = 8;  // a strip
constexpr int64_t kRegroupedRows = 16;    // the tallest strip

// Regroups the pixels into images of `rows` × 8, or into one image if that leaves a remainder.
template <class Plan>
void regroup(Plan& plan, int64_t rows) {
  const int64_t all = pixels(plan);
  if (all == 0 || all % kRegroupedColumns) return;
  plan.width = kRegroupedColumns;
  plan.height = all % (rows * kRegroupedColumns) ? all / kRegroupedColumns : rows;
  plan.batch = all / (plan.height * plan.width);
}

}  // namespace jaxunet
