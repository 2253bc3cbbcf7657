"""Finds the class of a kernel, and the level of its images, from its name and its instruction.

One custom call launches several of our kernels: a split weight gradient and the sum of its parts,
for instance. CUDA graphs hide which call launched which kernel, but kernels run in the order of
the program's calls, so `place` finds the calls again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxunet.benchmark.roofline import merged
from jaxunet.benchmark.roofline.work import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    CONVOLUTIONS,
    FEW,
    FEW_CHANNELS,
    FORWARD,
    INPUT_GRADIENT,
    LINEAR,
    NORM_BACKWARD,
    NORM_FORWARD,
    REDUCTIONS,
    REMAINING,
    UPDATE,
    WEIGHT_GRADIENT,
    Level,
)
from jaxunet.profile.hlo_text import HloLine, target
from jaxunet.profile.phases import BACKWARD, OPTIMIZER

Shape = tuple[int, ...]
# The class of one of our kernels or custom calls: the first pattern found in its name decides.
NAMES = (
    (re.compile(r'adamw|narrow|sum_of_squares|pack_kernel'), UPDATE),
    # Sums of split weight gradients, and of dy over the pixels for a bias.
    (re.compile(r'split_k_reduce|fold_upsampled|[a-z]_sums_kernel|group_norm_channel_sums'), REDUCTIONS),  # noqa: E501
    (re.compile(r'attention_backward|flash_(backward|delta)|backward_(query|key)_'), ATTENTION_BACKWARD),  # noqa: E501
    (re.compile(r'attention_forward|flash_forward|cuda_forward_kernel'), ATTENTION_FORWARD),
    (re.compile(r'group_norm_((dropout_)?gradient|backward|sum|dx|parameters)'), NORM_BACKWARD),
    (re.compile(r'group_norm_'), NORM_FORWARD),
    (re.compile(r'few_'), FEW_CHANNELS),
    (re.compile(r'linear|projection'), LINEAR),
    (re.compile(r'weight_gradient'), WEIGHT_GRADIENT),
    (re.compile(r'dx|shortcut_gradient'), INPUT_GRADIENT),
    (re.compile(r'conv3x3|(hopper|multistage|implicit_gemm)_forward'), FORWARD),
)  # fmt: skip
# The class of a custom call of a library: the first beginning of its target decides.
LIBRARIES = (
    ('__cudnn$convBackwardInput', INPUT_GRADIENT),
    ('__cudnn$convBackwardFilter', WEIGHT_GRADIENT),
    ('__cudnn$conv', FORWARD),
    ('__cublas', LINEAR),
)
# The class of a library's kernel whose call is unknown, and of XLA's own matrix products.
PRODUCTS = (
    (re.compile(r'dgrad'), INPUT_GRADIENT),
    (re.compile(r'wgrad'), WEIGHT_GRADIENT),
    (re.compile(r'fprop'), FORWARD),
    (re.compile(r'gemm|nvjet|cutlass'), LINEAR),
)
# Costs in `place`: a kernel that its call cannot have launched, and an unlikely boundary.
IMPOSSIBLE, UNLIKELY = 1000, 1


class Call(NamedTuple):
    """A call of one of the CUDA library's handlers, which may launch several kernels.

    Fields:
      name: name of its instruction.
      kind: its class.
      product: True for a forward convolution, its input gradient and a linear layer of images,
        which share kernels.
      merged: True for the weight gradients of several layers, each of which may have kernels of its
        own.
    """

    name: str
    kind: str
    product: bool
    merged: bool = False


def kind_of_name(name: str) -> str | None:
    """Returns the class of one of our kernels or custom calls from its name; None if unknown."""
    return next((kind for pattern, kind in NAMES if pattern.search(name)), None)


def handler_call(i: HloLine) -> Call | None:
    """Returns an instruction as a call of a handler; None if it is not one."""
    name = target(i)
    if not name.startswith('jaxunet_'):
        return None
    kind = kind_of_name(name) or REMAINING
    apart = re.search('weight_gradient|projection', name)
    product = kind in (FORWARD, INPUT_GRADIENT, LINEAR) and not apart
    if kind == FORWARD and re.search(r'\bflipped\s*=\s*true', i.rest):
        kind = INPUT_GRADIENT
    return Call(i.name, kind, product, name == merged.TARGET)


def kind_of_xla(i: HloLine | None, kernel: str, phase: str) -> str:
    """Returns the class of a kernel that XLA generated or that comes from a library.

    Args:
      i: its instruction; None if unknown.
      phase: one of `jaxunet.profile.phases.PHASES`.
    """
    if phase == OPTIMIZER:
        return UPDATE
    if i is not None and i.opcode == 'custom-call':
        for start, kind in LIBRARIES:
            if target(i).startswith(start):
                return kind
    text = f'{kernel} {i.name} {i.rest}' if i is not None and i.opcode == 'fusion' else kernel
    return next((kind for pattern, kind in PRODUCTS if pattern.search(text)), REMAINING)


def kind_of_own(kernel: str, call: Call | None, phase: str) -> str | None:
    """Returns the class of one of our kernels; None for a name that `NAMES` does not know.

    Args:
      call: the call that launched it; None for a Pallas kernel, or if it is unknown.
      phase: one of `jaxunet.profile.phases.PHASES`.
    """
    kind = kind_of_name(kernel)
    if call is not None and not call.merged and kind not in (None, REDUCTIONS):
        return call.kind
    # Without a call, only the phase tells a forward convolution from an input gradient.
    return INPUT_GRADIENT if kind == FORWARD and phase == BACKWARD else kind


def level_of(shapes: Sequence[Shape], levels: Collection[Level]) -> Shape:
    """Returns the largest level among shapes (batch, height, width, channels); () if there is none.

    Args:
      levels: (height, width) of the network's levels.
    """
    return max((shape[1:3] for shape in _images(shapes, levels)), default=())


def refined(kind: str, shapes: Sequence[Shape], levels: Collection[Level]) -> str:
    """Returns the class of one of our kernels, given the class that follows from its name.

    Convolutions with at most `FEW` channels on a side have their own.
    """
    few = any(shape[3] <= FEW for shape in _images(shapes, levels))
    return FEW_CHANNELS if few and kind in CONVOLUTIONS else kind


def _images(shapes: Sequence[Shape], levels: Collection[Level]) -> list[Shape]:
    return [shape for shape in shapes if len(shape) == 4 and shape[1:3] in levels]


def place(kernels: Sequence[str], calls: Sequence[Call]) -> list[int | None]:
    """Returns the index of the call that launched each kernel; None if no call can have.

    Every call launches one kernel or more, in the order of the calls. Among all ways to divide the
    kernels among the calls, it takes the one with the fewest impossible launches, and of these the
    one with the fewest unlikely launches: a sum that begins a call, or a product that does not
    (unless the call is `merged`).

    Args:
      kernels: names of the kernels, in the order in which they ran.
    """
    if not calls or len(kernels) < len(calls):
        return [None] * len(kernels)
    rows = {name: row for row, name in enumerate(dict.fromkeys(kernels))}
    costs = np.array([[0.0 if launches(c, k) else IMPOSSIBLE for c in calls] for k in rows])
    here = np.full(len(calls), np.inf)
    here[0] = costs[rows[kernels[0]], 0]
    single = np.array([not c.merged for c in calls])
    moved = np.zeros((len(kernels), len(calls)), bool)
    for k, name in enumerate(kernels[1:], 1):
        kind = kind_of_name(name)
        stay = here + (UNLIKELY * single if kind in (FORWARD, WEIGHT_GRADIENT) else 0)
        move = np.concatenate([[np.inf], here[:-1]]) + (UNLIKELY if kind == REDUCTIONS else 0)
        moved[k] = move < stay
        here = np.minimum(stay, move) + costs[rows[name]]
    placed: list[int | None] = []
    call = len(calls) - 1
    for k in reversed(range(len(kernels))):
        placed.append(call if costs[rows[kernels[k]], call] == 0 else None)
        call -= int(moved[k, call])
    return placed[::-1]


def launches(call: Call, kernel: str) -> bool:
    """Returns True if a call can launch a kernel of this name."""
    kind = kind_of_name(kernel)
    weights = call.kind == WEIGHT_GRADIENT or (call.kind == LINEAR and not call.product)
    if kind in (REDUCTIONS, WEIGHT_GRADIENT) or 'weight_gradient' in kernel:
        return weights
    return call.product if kind in (FORWARD, FEW_CHANNELS) else kind == call.kind
