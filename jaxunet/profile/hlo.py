"""Reads the text of a compiled program: what it launches, in which order, from which scopes."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxunet.profile.phases import OTHER, PHASES, phase_of

_MODULE = re.compile(r'HloModule ([^\s,]+)')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{')
# `%name = shape opcode(operands), attributes`: no shape has a word right before a parenthesis.
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][a-z0-9\-]*)\(([^)]*)\)')
_OPERAND = re.compile(r'%([\w.\-]+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FUSED = re.compile(r'calls=%?([\w.\-]+)')
_RUN = {'while': re.compile(r'body=%?([\w.\-]+)'), 'call': re.compile(r'to_apply=%?([\w.\-]+)')}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Opcodes that do no work.
_NOTHING = (
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'after-all',
    'partition-id',
    'replica-id',
)


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction.

    Fields:
      opcode: as XLA prints it, e.g. `fusion`, `all-reduce-start`.
      path: scopes and primitive, e.g. `jit(whole)/transpose(jvp(forward))/UNet/middle_res_0/mul`;
        '' if there is none.
    """

    opcode: str
    path: str


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Fields:
      name: name of the HLO module.
      instructions: the instructions of all computations, by name.
      schedule: names of the instructions that do work, in the order in which they run; the body of
        a loop is repeated for every trip.
    """

    name: str
    instructions: dict[str, Instruction]
    schedule: list[str]


class _Step(NamedTuple):
    """An instruction of a computation.

    Fields:
      runs: the computation that it runs; '' if none.
      trips: how often it runs it.
    """

    instruction: str
    runs: str
    trips: int


@dataclass
class _Computation:
    """One computation, with how often each scope path occurs in it."""

    steps: list[_Step] = field(default_factory=list)
    paths: collections.Counter[str] = field(default_factory=collections.Counter)


@dataclass
class _Module:
    """The parsed lines of a module; names are those of instructions unless said otherwise.

    Fields:
      paths: scope paths that name a phase; other paths are argument names or the compiler's own.
      operands: in the order of the text, in which operands come before their users.
      fused: fusion -> the computation that it calls.
      computations: by the name of the computation; `entry` is the one that the program runs.
    """

    opcodes: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    operands: dict[str, list[str]] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    computations: collections.defaultdict[str, _Computation] = field(
        default_factory=lambda: collections.defaultdict(_Computation)
    )
    entry: str = ''


def read_hlo(text: str) -> Program:
    """Reads the text of an optimised HLO module (`compiled.as_text()`).

    The compiler loses the scopes of some instructions and adds others (copies, broadcasts, many
    fusions). Such an instruction runs once its operands are there, so it gets the path of the
    latest phase within the fusion (the most frequent such path), else of the operand of the latest
    phase, else of the user of the earliest phase.
    """
    module = _parse(text)
    paths = _completed_paths(module)
    header = _MODULE.match(text)
    instructions = {
        name: Instruction(opcode, paths.get(name, '')) for name, opcode in module.opcodes.items()
    }
    return Program(header[1] if header else '', instructions, list(_schedule(module, module.entry)))


def _parse(text: str) -> _Module:
    module = _Module()
    here = ''
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            if header := _COMPUTATION.match(line):
                here = header[2]
                module.entry = here if header[1] else module.entry
            continue
        name, opcode = found[1], found[2]
        module.opcodes[name], module.operands[name] = opcode, _OPERAND.findall(found[3])
        computation = module.computations[here]
        path = _OP_NAME.search(line)
        if path and phase_of(path[1]) != OTHER:
            module.paths[name] = path[1]
            computation.paths[path[1]] += 1
        if opcode == 'fusion' and (calls := _FUSED.search(line)):
            module.fused[name] = calls[1]
        runs = _RUN[opcode].search(line) if opcode in _RUN else None
        trips = _TRIPS.search(line)
        computation.steps.append(
            _Step(name, runs[1] if runs else '', int(trips[1]) if trips else 1)
        )
    return module


def _completed_paths(module: _Module) -> Mapping[str, str]:
    """Returns the paths of the module, completed as `read_hlo` says."""
    paths = dict(module.paths)
    for name, body in module.fused.items():
        if name not in paths and (inside := module.computations[body].paths):
            paths[name] = max(inside, key=lambda path: (_order(path), inside[path]))
    users: dict[str, list[str]] = collections.defaultdict(list)
    for name, sources in module.operands.items():
        if name not in paths and (near := [paths[source] for source in sources if source in paths]):
            paths[name] = max(near, key=_order)
        for source in sources:
            users[source].append(name)
    for name in reversed(module.operands):
        if name not in paths and (near := [paths[user] for user in users[name] if user in paths]):
            paths[name] = min(near, key=_order)
    return paths


def _schedule(module: _Module, computation: str) -> Iterator[str]:
    for instruction, runs, trips in module.computations[computation].steps:
        if runs:
            for _ in range(trips):
                yield from _schedule(module, runs)
        elif module.opcodes[instruction] not in _NOTHING:
            yield instruction


def _order(path: str) -> int:
    return PHASES.index(phase_of(path))
