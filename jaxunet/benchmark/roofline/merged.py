"""Calls that compute the weight gradients of several layers.

Their kernels belong to no single layer, so the table shows their time and their work together: in
the class of convolutions' weight gradients, although some members may be linear layers, and in a
level of their own if the members have images of several sizes.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxunet.benchmark.roofline.work import LINEAR, WEIGHT_GRADIENT, Level, Work
from jaxunet.benchmark.traffic import Traffic
from jaxunet.profile.hlo_text import HloLine, target

Shape = tuple[int, ...]
TARGET = 'jaxunet_weight_gradients'
SEVERAL: Level = ('several',)
ATTRIBUTE = re.compile(r'\b(linear|parts|residuals|norm)_(\d+)\s*=\s*(\w+)')


class Member(NamedTuple):
    """The weight gradient of one layer.

    Fields:
      level: (height, width) of its images.
      flops: multiplications and additions of its product.
    """

    linear: bool
    level: Level
    flops: int


def merged_calls(traffic: Traffic) -> dict[str, list[Member]]:
    """Returns the members of each call of `TARGET` in a program, by the call's name."""
    return {
        name: members(i, traffic.shapes(i))
        for name, i in traffic.instructions.items()
        if target(i) == TARGET
    }


def members(i: HloLine, shapes: Sequence[Shape]) -> list[Member]:
    """Returns the members of a call of `TARGET`.

    Args:
      shapes: of its operands: for each member the parts of x, dy, the parts that a shortcut
        projects, and the sums of a norm; then the sums of further norms.
    """
    attributes: dict[int, dict[str, str]] = collections.defaultdict(dict)
    for name, index, value in ATTRIBUTE.findall(i.rest):
        attributes[int(index)][name] = value
    layers, rest = [], iter(shapes)
    for _, of_member in sorted(attributes.items()):
        linear = of_member['linear'] == 'true'
        x = [next(rest)[3] for _ in range(int(of_member.get('parts', 1)))]
        *image, features = next(rest)
        projected = [next(rest)[3] for _ in range(int(of_member.get('residuals', 0)))]
        if of_member.get('norm') == 'true':
            next(rest)
        taps = 1 if linear else 9
        flops = 2 * math.prod(image) * features * (taps * sum(x) + sum(projected))
        layers.append(Member(linear, tuple(image[1:]), flops))
    return layers


def level_of_members(layers: Iterable[Member]) -> Level:
    """Returns the level of all members; `SEVERAL` if they have several."""
    levels = {member.level for member in layers}
    return levels.pop() if len(levels) == 1 else SEVERAL


def moved(work: Sequence[Work], calls: Iterable[Sequence[Member]]) -> list[Work]:
    """Returns the work with that of each call's members in the class and level of their kernels.

    Members with few channels have kernels, and a class, of their own.
    """
    changed = list(work)
    for call in calls:
        level = level_of_members(call)
        for member in call:
            sought = (LINEAR, ()) if member.linear else (WEIGHT_GRADIENT, member.level)
            same = [
                index
                for index, w in enumerate(changed)
                if (w.kind, w.level, w.flops) == (*sought, member.flops)
            ]
            if same:
                # The forward product of a linear layer also moves its residual.
                index = min(same, key=lambda index: changed[index].bytes)
                changed[index] = changed[index]._replace(kind=WEIGHT_GRADIENT, level=level)
    return changed
