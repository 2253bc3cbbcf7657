"""A profiler trace (.xplane.pb) as plain rows: operations of the devices, and what the host's threads did."""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.profiler import ProfileData

from jaxunet.profile.align import align, is_copy, stem
from jaxunet.profile.hlo import Program
from jaxunet.profile.phases import (
    ALL_REDUCE,
    DATA,
    XLA,
    backend_of,
    is_collective,
    own_name,
    phase_of,
)

_GPU = re.compile(r'/device:GPU:(\d+)')
# Of the tracer itself, and of XLA's CPU executor around the operations.
_NOISE = ('end: ', 'ThreadpoolListener::', 'ThunkExecutor::', '<UNKNOWN>', 'BUFFER_FLUSH')
# Their bodies' operations are rows of their own.
_CONTAINER = re.compile(r'(while|conditional|call)(\.\d+)?$')

KERNEL, COPY, COLLECTIVE = 'kernel', 'copy', 'collective'


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """One operation on a device: a kernel or copy of a GPU's stream, or on the CPU an HLO instruction on one of XLA's threads.

    Fields:
      name: of the kernel (GPU) or instruction (CPU).
      operation: what it counts as: its name without the compiler's numbers, what a library was asked for (`cudnn-conv-bw-filter`), or a
        kernel of the project (`jaxunet_...`).
      hlo: the instruction that it is part of; '' for what no compiled program asked for.
      path: its scopes (`jaxunet.profile.hlo`).
      kind: `kernel`, `copy` or `collective`.
      start, duration: nanoseconds; all rows of a trace share one clock.
      device, line: number of the device, name of the stream or thread.
      graph: whether it was launched as part of a CUDA graph.
    """

    name: str
    operation: str
    hlo: str
    path: str
    kind: str
    phase: str
    backend: str
    start: float
    duration: float
    device: int
    line: str
    graph: bool

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class HostEvent:
    """A stretch of one host thread, nanoseconds; `own` is its duration without the events within it."""

    name: str
    thread: str
    start: float
    duration: float
    own: float


@dataclass(frozen=True)
class Trace:
    """What a trace shows. `platform` says what the device operations are: `gpu`, or `cpu` if XLA's threads of the host."""

    platform: str
    ops: list[DeviceOp]
    host: list[HostEvent]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a trace as it stands there; nanoseconds."""

    name: str
    start: float
    duration: float
    stats: dict[str, Any]


Lines = Iterable[tuple[str, list[Event]]]  # name and events of each stream or thread


def read_trace(path: pathlib.Path, program: Program, steps: int) -> Trace:
    """Reads a trace as `jax.profiler` writes it.

    Args:
      program: what was traced (`read_hlo`), for the scopes of its operations.
      steps: how often it ran.
    """
    with warnings.catch_warnings():
        warnings.simplefilter(
            'ignore', DeprecationWarning
        )  # of the reader's own classes, under Python 3.13
        planes = [
            (
                plane.name,
                [(line.name, [_event(event) for event in line.events]) for line in plane.lines],
            )
            for plane in ProfileData.from_file(str(path)).planes
        ]
    return build_trace(planes, program, steps)


def _event(event: Any) -> Event:
    return Event(event.name, event.start_ns, event.duration_ns, dict(event.stats))


def build_trace(planes: Iterable[tuple[str, Lines]], program: Program, steps: int) -> Trace:
    """`read_trace` on planes already read: (name, [(line's name, events)])."""
    gpu: list[DeviceOp] = []
    cpu: list[DeviceOp] = []
    host: list[HostEvent] = []
    for name, threads in planes:
        lines = list(threads)
        if device := _GPU.search(name):
            gpu += _gpu_ops(int(device[1]), lines, program, steps)
        elif name == '/host:CPU':
            ends = {
                (e.name[5:], e.stats['_c']): e.start
                for _, events in lines
                for e in events
                if e.name.startswith('end: ')
            }
            for line, events in lines:
                cpu += _cpu_ops(line, events, ends, program)
                host += _host_events(line, events)
    return Trace('gpu', gpu, host) if gpu else Trace('cpu', cpu, host)


def _gpu_ops(device: int, lines: Lines, program: Program, steps: int) -> list[DeviceOp]:
    # Lines that are no streams repeat the same time, by module or step.
    order = sorted(
        ((line, e) for line, events in lines if line.startswith('Stream') for e in events),
        key=lambda pair: pair[1].start,
    )
    own = [
        e
        for _, e in order
        if e.stats.get('hlo_module') == program.name and not is_collective(e.name)
    ]
    told_of = {e.stats.get('hlo_op') for e in own} & program.instructions.keys()
    hidden = [e for e in own if e.stats.get('hlo_op') not in told_of]
    aligned: dict[int, str] = {}
    if hidden and len(hidden) % steps == 0:
        schedule = [
            name
            for name in program.schedule
            if name not in told_of and not is_collective(program.instructions[name].opcode)
        ]
        libraries = [program.instructions[name].opcode == 'custom-call' for name in schedule]
        found: dict[tuple[str, ...], list[str]] = {}  # every step is the same, as a rule
        count = len(hidden) // steps
        for first in range(0, len(hidden), count):
            events = hidden[first : first + count]
            kernels = tuple(e.name for e in events)
            found[kernels] = found.get(kernels) or align(kernels, schedule, libraries)
            aligned |= {id(e): name for e, name in zip(events, found[kernels], strict=True)}
    ops = []
    for line, e in order:
        told = str(e.stats.get('hlo_op', ''))
        ops.append(
            _device_op(
                e,
                e.duration,
                device,
                line,
                told if told in program.instructions else aligned.get(id(e), told),
                program,
            )
        )
    return ops


def _cpu_ops(
    line: str, events: list[Event], ends: Mapping[Any, float], program: Program
) -> list[DeviceOp]:
    ops = []
    for e in events:
        if 'hlo_op' in e.stats and not _CONTAINER.match(e.name):
            # Some are only started by their event, and go on in other threads until `end: NAME`.
            end = max(e.start + e.duration, ends.get((e.name, e.stats.get('_p')), 0.0))
            ops.append(
                _device_op(
                    e,
                    end - e.start,
                    int(e.stats.get('device_ordinal', 0)),
                    line,
                    str(e.stats['hlo_op']),
                    program,
                )
            )
    return ops


def _device_op(
    e: Event, duration: float, device: int, line: str, hlo: str, program: Program
) -> DeviceOp:
    module = e.stats.get('hlo_module', '')
    known = program.instructions.get(hlo) if module == program.name else None
    path, opcode = (known.path, known.opcode) if known else ('', '')
    if is_collective(e.name, hlo, opcode):
        kind, phase = COLLECTIVE, ALL_REDUCE
    else:
        kind = COPY if is_copy(e.name) else KERNEL
        # What no program asked for is a batch on its way to the device, or metrics on their way back.
        phase = phase_of(path) if module or kind == KERNEL else DATA
    backend = backend_of(e.name, hlo)
    operation = stem(e.name)
    if backend != XLA:
        operation = own_name(e.name, hlo)
    elif kind == KERNEL and opcode == 'custom-call' and stem(hlo) != opcode:
        operation = stem(hlo)
    return DeviceOp(
        name=e.name,
        operation=operation,
        hlo=hlo,
        path=path,
        kind=kind,
        phase=phase,
        backend=backend,
        start=e.start,
        duration=duration,
        device=device,
        line=line,
        graph=int(e.stats.get('cuda_graph_id', 0)) > 0,
    )


def _host_events(line: str, events: list[Event]) -> list[HostEvent]:
    """The events of one thread but the device's, each with its own time."""
    order = sorted(
        (e for e in events if e.duration > 0 and not e.name.startswith(_NOISE)),
        key=lambda e: (e.start, -e.duration),
    )
    own = [e.duration for e in order]
    open_: list[int] = []
    for i, e in enumerate(order):
        while open_ and order[open_[-1]].start + order[open_[-1]].duration <= e.start:
            open_.pop()
        if open_:
            own[open_[-1]] -= e.duration
        open_.append(i)
    return [
        HostEvent(e.name, line, e.start, e.duration, max(t, 0.0))
        for e, t in zip(order, own, strict=True)
        if 'hlo_op' not in e.stats
    ]
