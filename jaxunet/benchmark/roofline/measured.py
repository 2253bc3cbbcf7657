"""Sums up the kernels of a traced step by class and level, with the work of each class."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxunet.benchmark.device import Rates
from jaxunet.benchmark.roofline.classify import (
    Call,
    handler_call,
    kind_of_own,
    kind_of_xla,
    level_of,
    place,
    refined,
)
from jaxunet.benchmark.roofline.merged import level_of_members, merged_calls, moved
from jaxunet.benchmark.roofline.work import LEVELLED, REMAINING, Level, Work
from jaxunet.benchmark.traffic import Traffic
from jaxunet.profile.events import DeviceOp, Trace
from jaxunet.profile.hlo import Program, read_hlo
from jaxunet.profile.hlo_text import target
from jaxunet.profile.phases import CUDA, XLA, own_name, phase_of


class Line(NamedTuple):
    """One class of kernels, or one of its levels, per step.

    Fields:
      level: () = all levels.
      launches: kernels and copies.
      flops, bytes: operations and bytes that the work needs; see `jaxunet.benchmark.roofline.work`.
      floor_ms: sum over ops of max(arithmetic time, memory time) at the device's measured rates.
      ms: time of the kernels.
    """

    kind: str
    level: Level
    launches: float
    flops: int
    bytes: int
    floor_ms: float
    ms: float


class StepKernels(NamedTuple):
    """The kernels of a step.

    Fields:
      lines: sums by class, and by class and level for `LEVELLED`, in no order.
      unplaced: kernels of the CUDA library, per step, whose call was not found; they get their
        class from their name, and no level.
      unknown: names of our kernels that have no class; they count among XLA's remaining kernels.
    """

    lines: list[Line]
    unplaced: float
    unknown: list[str]


def measure(trace: Trace, hlo: str, steps: int, work: Sequence[Work], rates: Rates) -> StepKernels:
    """Returns the lines of a traced step, with its work.

    Args:
      trace: the trace of `steps` steps on one device.
      hlo: the text of the traced program, which runs one step.
      work: the result of `step_work` for the same config.
    """
    traffic, program = Traffic(hlo), read_hlo(hlo)
    levels = {w.level for w in work if w.level}
    called, unplaced = _calls(trace.ops, traffic, program, steps)
    several = merged_calls(traffic)
    spent: dict[tuple[str, Level], list[float]] = collections.defaultdict(list)
    unknown: set[str] = set()
    for op in trace.ops:
        call = called.get(id(op))
        known = traffic.instructions.get(call.name if call else op.hlo)
        if op.backend == XLA:
            kind: str | None = kind_of_xla(known, op.name, op.phase)
        else:
            kind = kind_of_own(op.operation, call, op.phase)
        if kind is None:
            unknown.add(op.operation)
        # A kernel without a call may have been matched with another kernel's instruction.
        sure = known is not None and (op.backend != CUDA or call is not None)
        shapes = traffic.shapes(known) if known is not None and sure else []
        kind = kind or REMAINING
        level: Level = level_of(shapes, levels)
        if call is not None and call.merged:
            level = level_of_members(several[call.name])
        elif op.backend != XLA:  # in `step_work`, too, XLA has no convolutions with few channels
            kind = refined(kind, shapes, levels)
        for key in _keys(kind, level):
            spent[key].append(op.duration)
    every = [*moved(work, several.values()), *_remaining(traffic, program)]
    return StepKernels(_lines(every, spent, steps, rates), unplaced, sorted(unknown))


def _calls(
    ops: Sequence[DeviceOp], traffic: Traffic, program: Program, steps: int
) -> tuple[dict[int, Call], float]:
    """Returns the handler call of each kernel of the CUDA library, and how many have none per step.

    Calls are by `id` of the kernel. The trace names the instructions of kernels outside of CUDA
    graphs. The other kernels are placed among the calls that the trace does not name.
    """
    every = (handler_call(traffic.instructions[name]) for name in program.schedule)
    calls = [call for call in every if call is not None]
    by_name = {call.name: call for call in calls}
    kernels = sorted((op for op in ops if op.backend == CUDA), key=lambda op: op.start)
    named = {id(op): by_name[op.hlo] for op in kernels if not op.graph and op.hlo in by_name}
    hidden = [op for op in kernels if id(op) not in named]
    open_calls = [call for call in calls if call not in set(named.values())]
    by_kernel = dict(named)
    each, rest = divmod(len(hidden), steps)
    placed: dict[tuple[str, ...], list[int | None]] = {}  # a cache: most steps run the same kernels
    for first in range(0, 0 if rest else len(hidden), each or 1):
        step = hidden[first : first + each]
        names = tuple(op.operation for op in step)
        if names not in placed:
            placed[names] = place(names, open_calls)
        by_kernel |= {
            id(op): open_calls[index]
            for op, index in zip(step, placed[names], strict=True)
            if index is not None
        }
    return by_kernel, (len(kernels) - len(by_kernel)) / steps


def _remaining(traffic: Traffic, program: Program) -> Iterable[Work]:
    """Yields the work of XLA's remaining kernels: each reads its operands and writes its results.

    This is the work of the compiled program; other fusions may need less.
    """
    for name in program.schedule:
        i = traffic.instructions[name]
        ours = own_name(target(i), i.name) if i.opcode == 'custom-call' else ''
        phase = phase_of(program.instructions[name].path)
        if not ours and kind_of_xla(i, i.name, phase) == REMAINING:
            yield Work(REMAINING, (), 0, traffic.of(i))


def _keys(kind: str, level: Level) -> list[tuple[str, Level]]:
    """Returns the lines that a kernel or its work counts in."""
    return [(kind, ()), (kind, level)] if kind in LEVELLED and level else [(kind, ())]


def _lines(
    work: Iterable[Work],
    spent: Mapping[tuple[str, Level], Sequence[float]],
    steps: int,
    rates: Rates,
) -> list[Line]:
    needed: dict[tuple[str, Level], list[Work]] = collections.defaultdict(list)
    for w in work:
        for key in _keys(w.kind, w.level):
            needed[key].append(w)
    return [
        Line(
            *key,
            launches=len(spent.get(key, ())) / steps,
            flops=sum(w.flops for w in needed.get(key, ())),
            bytes=sum(w.bytes for w in needed.get(key, ())),
            floor_ms=sum(floor_ms(w, rates) for w in needed.get(key, ())),
            ms=sum(spent.get(key, ())) * 1e-6 / steps,
        )
        for key in dict.fromkeys([*needed, *spent])
    ]


def floor_ms(work: Work, rates: Rates) -> float:
    """Returns the least milliseconds that an op can take at these rates."""
    return max(work.flops / rates.matmul_flops, work.bytes / rates.copy_bytes) * 1e3
