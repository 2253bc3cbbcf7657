"""The compiled program's text: what it launches in which order, and which scope of the Python code each instruction came from."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxunet.profile.phases import OTHER, PHASES, phase_of

_MODULE = re.compile(r'HloModule ([^\s,]+)')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{')
# `%name = shape opcode(operands), attributes`: no shape, not even a tuple's, has a word right before a parenthesis.
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][a-z0-9\-]*)\(([^)]*)\)')
_OPERAND = re.compile(r'%([\w.\-]+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FUSED = re.compile(r'calls=%?([\w.\-]+)')
_RUN = {'while': re.compile(r'body=%?([\w.\-]+)'), 'call': re.compile(r'to_apply=%?([\w.\-]+)')}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NOTHING = (
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'after-all',
    'partition-id',
    'replica-id',
)  # no work


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction.

    Fields:
      opcode: as XLA prints it, e.g. `fusion`, `all-reduce-start`.
      path: scopes and primitive, e.g. `jit(whole)/transpose(jvp(forward))/UNet/middle_res_0/mul`; '' if there is none to be found.
    """

    opcode: str
    path: str


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Fields:
      name: of the module. instructions: by name, of all computations.
      schedule: names of the instructions that do work, in the order in which they run; a loop's body as often as it does.
    """

    name: str
    instructions: dict[str, Instruction]
    schedule: list[str]


@dataclass
class _Computation:
    """Lines of one computation: (instruction, computation that it runs, how often)."""

    steps: list[tuple[str, str, int]]
    paths: collections.Counter[str]


def read_hlo(text: str) -> Program:
    """Reads `compiled.as_text()`.

    Where the compiler lost the scope, or made the instruction up (copies, broadcasts, many fusions), it runs when its operands are there:
    the path is that of the latest phase in the fusion (the commonest there), else of the operand of the latest phase, else of the user of
    the earliest.
    """
    opcodes: dict[str, str] = {}
    paths: dict[
        str, str
    ] = {}  # those that tell a phase; others are argument names, or what the compiler left
    operands: dict[str, list[str]] = {}
    fused: dict[str, str] = {}
    computations: dict[str, _Computation] = collections.defaultdict(
        lambda: _Computation([], collections.Counter())
    )
    here = entry = ''
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            if header := _COMPUTATION.match(line):
                here = header[2]
                entry = here if header[1] else entry
            continue
        name, opcode = found[1], found[2]
        opcodes[name], operands[name] = opcode, _OPERAND.findall(found[3])
        path = _OP_NAME.search(line)
        if path and phase_of(path[1]) != OTHER:
            paths[name] = path[1]
            computations[here].paths[path[1]] += 1
        if opcode == 'fusion' and (calls := _FUSED.search(line)):
            fused[name] = calls[1]
        runs = _RUN[opcode].search(line) if opcode in _RUN else None
        trips = _TRIPS.search(line)
        computations[here].steps.append(
            (name, runs[1] if runs else '', int(trips[1]) if trips else 1)
        )
    for name, body in fused.items():
        if name not in paths and (inside := computations[body].paths):
            paths[name] = max(inside, key=lambda path: (_order(path), inside[path]))
    users: dict[str, list[str]] = collections.defaultdict(list)
    for (
        name,
        sources,
    ) in operands.items():  # in the order of the text, operands come before their users
        if name not in paths and (near := [paths[source] for source in sources if source in paths]):
            paths[name] = max(near, key=_order)
        for source in sources:
            users[source].append(name)
    for name in reversed(operands):
        if name not in paths and (near := [paths[user] for user in users[name] if user in paths]):
            paths[name] = min(near, key=_order)
    module = _MODULE.match(text)
    instructions = {
        name: Instruction(opcode, paths.get(name, '')) for name, opcode in opcodes.items()
    }
    return Program(
        module[1] if module else '', instructions, list(_schedule(entry, computations, opcodes))
    )


def _schedule(
    name: str, computations: dict[str, _Computation], opcodes: dict[str, str]
) -> Iterator[str]:
    for instruction, runs, trips in computations[name].steps:
        if runs:
            for _ in range(trips):
                yield from _schedule(runs, computations, opcodes)
        elif opcodes[instruction] not in _NOTHING:
            yield instruction


def _order(path: str) -> int:
    return PHASES.index(phase_of(path))
