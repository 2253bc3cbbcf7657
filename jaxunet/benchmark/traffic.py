"""Estimates the bytes that a compiled program moves, from its optimised HLO.

XLA's own `cost_analysis` counts nothing for a custom call, so it cannot compare programs with and
without hand-written kernels. Here every kernel (fusion, convolution, matrix product, custom call)
reads its operands once and writes its results once. This ignores caches between kernels, and
operands that a kernel reads twice.
"""

from __future__ import annotations

import re

from jaxunet.profile.hlo_text import HloLine, called, does_work, parse, target, trip_count

# Bits of the types whose names do not say it.
BITS = {'pred': 8, 'token': 0, 'bf16': 16, 'c64': 64, 'c128': 128}
SLICES = {'dynamic-slice', 'gather'}
LIBRARIES = ('__cublas', '__cudnn')  # custom calls that return (value, scratch space)

ARRAY = re.compile(r'([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]')


def bytes_moved(hlo: str) -> int:
    """Returns the bytes that one execution of an optimised HLO module reads and writes.

    A gather or dynamic slice reads as much as it returns; an in-place update reads and writes only
    the update. The body of a loop counts as often as it runs, or once if that is unknown; a
    conditional counts its most expensive branch.

    Args:
      hlo: the text of `compiled.as_text()`.

    Raises:
      ValueError: the text has no entry computation.
    """
    return Traffic(hlo).total()


class Traffic:
    """The bytes that each instruction of an optimised HLO module moves; see `bytes_moved`.

    Attributes:
      instructions: the instructions of all computations, by name.

    Raises:
      ValueError: the text has no entry computation.
    """

    def __init__(self, hlo: str) -> None:
        self._computations, self._entry = parse(hlo)
        if not self._entry:
            raise ValueError('expected the text of an HLO module with an ENTRY computation')
        self.instructions = {i.name: i for body in self._computations.values() for i in body}
        self._totals: dict[str, int] = {}

    def total(self, computation: str = '') -> int:
        """Returns the bytes of one execution of a computation; '' is the entry."""
        name = computation or self._entry
        if name not in self._totals:
            self._totals[name] = sum(self.of(i) for i in self._computations[name])
        return self._totals[name]

    def of(self, i: HloLine) -> int:
        """Returns the bytes of one execution of an instruction."""
        if not does_work(i):
            return 0
        if i.opcode == 'while':
            return trip_count(i) * self.total(called(i, 'body')[0])
        if i.opcode == 'conditional':
            branches = called(i, 'branch_computations') or called(i, 'true_computation') + called(
                i, 'false_computation'
            )
            return max(self.total(name) for name in branches)
        if i.opcode in ('call', 'async-start'):
            return sum(self.total(name) for name in called(i, 'to_apply') + called(i, 'calls'))
        known = self.instructions
        sizes = [shape_bytes(known[name].shape) if name in known else 0 for name in i.operands]
        if i.opcode == 'fusion':
            return _fusion(self._computations[called(i, 'calls')[0]], sizes)
        if i.opcode in SLICES:
            return 2 * shape_bytes(i.shape) + sum(sizes[1:])
        if i.opcode == 'dynamic-update-slice':
            return 2 * sizes[1]
        if i.opcode == 'copy-start':
            return 2 * sizes[0]
        if i.opcode == 'custom-call' and target(i).startswith(LIBRARIES):
            arrays = ARRAY.findall(i.shape)
            return sum(sizes) + _array_bytes(*arrays[0])
        return sum(sizes) + shape_bytes(i.shape)

    def shapes(self, i: HloLine) -> list[tuple[int, ...]]:
        """Returns the dimensions of the arrays that an instruction reads and writes."""
        known = self.instructions
        texts = [known[name].shape for name in i.operands if name in known] + [i.shape]
        return [
            tuple(int(size.strip('<=')) for size in dimensions.split(',') if size)
            for text in texts
            for _, dimensions in ARRAY.findall(text)
        ]


def shape_bytes(shape: str) -> int:
    """Returns the bytes of a shape such as `f32[2,3]{1,0}`, or of a tuple of shapes."""
    return sum(_array_bytes(*array) for array in ARRAY.findall(shape))


def _array_bytes(dtype: str, dimensions: str) -> int:
    digits = re.search(r'\d+', dtype)
    bits = BITS[dtype] if dtype in BITS else int(digits[0]) if digits else 0
    count = 1
    for size in dimensions.split(','):
        count *= int(size.strip('<=')) if size else 1
    return count * bits // 8


def _fusion(body: list[HloLine], sizes: list[int]) -> int:
    """Returns the bytes of a fusion.

    A sliced operand counts only its slices, an in-place update only the update.

    Args:
      sizes: bytes of the operands.
    """
    parameters = {i.name: int(re.match(r'\d+', i.rest)[0]) for i in body if i.opcode == 'parameter'}  # type: ignore[index]
    by_name = {i.name: i for i in body}
    read = list(sizes)
    for name, number in parameters.items():
        users = [i for i in body if name in i.operands]
        if users and all(
            i.opcode in SLICES and i.operands[0] == name and name not in i.operands[1:]
            for i in users
        ):
            read[number] = sum(shape_bytes(i.shape) for i in users)
        elif users and all(
            i.opcode == 'dynamic-update-slice' and i.operands[0] == name for i in users
        ):
            read[number] = 0
    last = next(i for i in body if i.root)
    results = [by_name[name] for name in last.operands] if last.opcode == 'tuple' else [last]
    written = [by_name[i.operands[1]] if i.opcode == 'dynamic-update-slice' else i for i in results]
    return sum(read) + sum(shape_bytes(i.shape) for i in written)
