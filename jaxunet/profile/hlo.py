"""Reads the text of a compiled program: what it launches, in which order, from which scopes."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxunet.profile.hlo_text import HloLine, Module, called, does_work, parse, trip_count
from jaxunet.profile.phases import OTHER, PHASES, phase_of

_MODULE = re.compile(r'HloModule ([^\s,]+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_RUN = {'while': 'body', 'call': 'to_apply'}  # attribute that names the computation that is run


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
        a loop is repeated for every trip, and a conditional is one instruction.
    """

    name: str
    instructions: dict[str, Instruction]
    schedule: list[str]


def read_hlo(text: str) -> Program:
    """Reads the text of an optimised HLO module (`compiled.as_text()`).

    The compiler drops the scopes of some instructions, and adds instructions without scopes
    (copies, broadcasts, many fusions). Such an instruction runs as soon as its operands are ready.
    So it gets the most frequent path of the latest phase within the fusion; otherwise the path of
    the operand with the latest phase; otherwise that of the user with the earliest phase.
    """
    module = parse(text)
    lines = {line.name: line for body in module.computations.values() for line in body}
    paths = _completed_paths(module, lines)
    header = _MODULE.match(text)
    instructions = {
        name: Instruction(line.opcode, paths.get(name, '')) for name, line in lines.items()
    }
    return Program(header[1] if header else '', instructions, list(_schedule(module, module.entry)))


def _completed_paths(module: Module, lines: dict[str, HloLine]) -> Mapping[str, str]:
    """Returns the paths of the instructions by name, completed as `read_hlo` says."""
    paths: dict[str, str] = {}
    inside: dict[str, collections.Counter[str]] = {}  # paths within each computation
    for computation, body in module.computations.items():
        own = {line.name: path for line in body if (path := _stated_path(line))}
        paths |= own
        inside[computation] = collections.Counter(own.values())
    for name, line in lines.items():
        fused = called(line, 'calls') if line.opcode == 'fusion' and name not in paths else []
        if fused and (inner := inside.get(fused[0])):
            paths[name] = max(inner, key=lambda path: (_order(path), inner[path]))
    users: dict[str, list[str]] = collections.defaultdict(list)
    for name, line in lines.items():
        near = [paths[source] for source in line.operands if source in paths]
        if name not in paths and near:
            paths[name] = max(near, key=_order)
        for source in line.operands:
            users[source].append(name)
    for name in reversed(lines):
        near = [paths[user] for user in users[name] if user in paths]
        if name not in paths and near:
            paths[name] = min(near, key=_order)
    return paths


def _stated_path(line: HloLine) -> str:
    """Returns the scope path of an instruction if it names a phase, else ''.

    Other paths are names of arguments or the compiler's own.
    """
    path = _OP_NAME.search(line.rest)
    return path[1] if path and phase_of(path[1]) != OTHER else ''


def _schedule(module: Module, computation: str) -> Iterator[str]:
    for line in module.computations.get(computation, []):
        runs = called(line, _RUN[line.opcode]) if line.opcode in _RUN else []
        if runs:
            for _ in range(trip_count(line)):
                yield from _schedule(module, runs[0])
        elif does_work(line):
            yield line.name


def _order(path: str) -> int:
    return PHASES.index(phase_of(path))
