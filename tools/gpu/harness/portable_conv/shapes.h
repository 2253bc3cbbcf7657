// The convolutions and linear layers of the residual blocks in a training step of
// configs/elephants64.py: forward, input gradients and weight gradients.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cases.h"

namespace harness {

enum CallKind { kForward, kInputs, kWeights, kKinds };
constexpr const char* kKindNames[] = {"forward", "inputs", "weights"};

struct Call {
  CallKind kind;
  int count;  // calls in a step
  Case shape;
  std::string name;
};

// Equal residual blocks: their number, side of the image, channels of the input's parts, features.
// The second convolution of a block adds the block's input, or, if its channels are not the
// features, a projection of it.
struct Block {
  int count, side;
  std::vector<int> parts;
  int features;
};
inline const std::vector<Block> kBlocks = {
    {2, 64, {64}, 64},        {1, 64, {128, 64}, 64},   {2, 64, {64, 64}, 64},
    {1, 32, {64}, 128},       {1, 32, {128}, 128},      {1, 32, {192, 128}, 128},
    {1, 32, {128, 128}, 128}, {1, 32, {128, 64}, 128},  {1, 16, {128}, 192},
    {1, 16, {192}, 192},      {1, 16, {256, 192}, 192}, {1, 16, {192, 192}, 192},
    {1, 16, {192, 128}, 192}, {1, 8, {192}, 256},       {3, 8, {256}, 256},
    {2, 8, {256, 256}, 256},  {1, 8, {256, 192}, 256},
};

inline int64_t weights_of(const Case& c) {
  int64_t rows = 0;
  for (const int width : c.parts) rows += 9 * width;
  for (const int width : c.projected) rows += width;
  return rows * c.features;
}
inline double flops_of(const Case& c) {
  return 2.0 * c.batch * c.height * c.width * static_cast<double>(weights_of(c));
}

inline std::string name_of(const Case& c) {
  const auto joined = [](const std::vector<int>& widths) {
    std::string all;
    for (const int width : widths) all += (all.empty() ? "" : "+") + std::to_string(width);
    return all;
  };
  std::string name = std::to_string(c.height) + "^2 " + joined(c.parts);
  if (!c.projected.empty()) name += " proj " + joined(c.projected);
  if (!c.residual.empty()) name += " res";
  return name + " to " + std::to_string(c.features);
}

// The calls of a step. Equal ones are one entry, with their number.
inline std::vector<Call> calls_of_step(int batch) {
  std::vector<Call> calls;
  const auto add = [&](CallKind kind, int count, const Case& shape) {
    const std::string name = name_of(shape);
    for (Call& call : calls) {
      if (call.kind == kind && call.name == name) {
        call.count += count;
        return;
      }
    }
    calls.push_back({kind, count, shape, name});
  };
  for (const auto& [count, side, parts, features] : kBlocks) {
    const std::vector<int> none, out = {features};
    const bool shortcut = parts != out;
    const auto &projected = shortcut ? parts : none, &residual = shortcut ? none : parts;
    add(kForward, count, {batch, side, side, parts, features, none, none, false, 2});
    add(kForward, count, {batch, side, side, out, features, projected, residual, false, 1});
    for (const int width : parts) {
      add(kInputs, count, {batch, side, side, out, width, none, none, true, 1});
      if (shortcut) add(kInputs, count, {batch, side, side, none, width, out, none, true, 0});
    }
    add(kInputs, count, {batch, side, side, out, features, none, none, true, 1});
    add(kWeights, count, {batch, side, side, parts, features});
    add(kWeights, count, {batch, side, side, out, features, projected});
  }
  std::stable_sort(calls.begin(), calls.end(),
                   [](const Call& a, const Call& b) { return a.kind < b.kind; });
  return calls;
}

}  // namespace harness
