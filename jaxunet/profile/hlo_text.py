"""Parses the text of an optimised HLO module, as `compiled.as_text()` gives it."""

from __future__ import annotations

import re
from typing import NamedTuple

_COMMENT = re.compile(r'/\*.*?\*/')
_HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+)\s*(?:\(.*\))?\s*(?:->.*)?\{\s*$')
_LINE = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$')

_NOTHING = {
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id',
    'replica-id', 'opt-barrier', 'async-update',
}  # fmt: skip


class HloLine(NamedTuple):
    """One instruction.

    Fields:
      shape: shape of its result, such as `f32[2,3]{1,0}`, or a tuple of shapes.
      opcode: as XLA prints it, such as `fusion` or `all-reduce-start`.
      operands: names of the instructions that it reads.
      rest: the text after the opening bracket of the operands, with the attributes.
      root: True if its result is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool


class Module(NamedTuple):
    """A parsed HLO module.

    Fields:
      computations: the instructions of each computation by its name, in the order of the text, in
        which operands come before their users.
      entry: name of the computation that the program runs; '' if none is marked.
    """

    computations: dict[str, list[HloLine]]
    entry: str


def parse(hlo: str) -> Module:
    """Returns the computations of a module."""
    computations: dict[str, list[HloLine]] = {}
    entry = current = ''
    for text in _COMMENT.sub('', hlo).splitlines():
        if match := _LINE.match(text):
            root, name, shape, opcode, rest = match.groups()
            operands = tuple(_operands(_until_closed(rest)))
            line = HloLine(name, shape, opcode, operands, rest, bool(root))
            computations.setdefault(current, []).append(line)
        elif match := _HEADER.match(text):
            current = match[2]
            computations[current] = []
            entry = current if match[1] else entry
    return Module(computations, entry)


def called(line: HloLine, attribute: str) -> list[str]:
    """Returns the computations that an attribute such as `calls` or `body` names."""
    match = re.search(rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)', line.rest)
    return re.findall(r'%?([\w.\-]+)', match[1]) if match else []


def trip_count(line: HloLine) -> int:
    """Returns the number of times that a loop runs its body; 1 if unknown, or if not a loop."""
    match = re.search(r'known_trip_count[^0-9]*(\d+)', line.rest)
    return int(match[1]) if match else 1


def does_work(line: HloLine) -> bool:
    """Returns False for an instruction that only names values or waits for a `-start`."""
    return line.opcode not in _NOTHING and not line.opcode.endswith('-done')


def target(line: HloLine) -> str:
    """Returns the target of a custom call, such as `jaxunet_conv3x3`; '' for other instructions."""
    match = re.search(r'custom_call_target="([^"]*)"', line.rest)
    return match[1] if match else ''


def _until_closed(rest: str) -> str:
    """Returns the text before the bracket that closes the operands."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == '(') - (letter == ')')
        if depth == 0:
            return rest[:place]
    return rest


def _operands(inside: str) -> list[str]:
    """Returns the names of the operands, with or without printed shapes."""
    named = re.findall(r'%([\w.\-]+)', inside)
    return named or [part.split()[-1] for part in inside.split(',') if part.strip()]
