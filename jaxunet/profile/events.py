"""Reads a profiler trace (.xplane.pb): the operations of the devices and the events of the host."""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jax.profiler import ProfileData, ProfileEvent

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
# Events to ignore: those of the tracer itself, and of XLA's CPU executor around the operations.
_NOISE = ('end: ', 'ThreadpoolListener::', 'ThunkExecutor::', '<UNKNOWN>', 'BUFFER_FLUSH')
# Instructions whose bodies have their own events.
_CONTAINER = re.compile(r'(while|conditional|call)(\.\d+)?$')

KERNEL, COPY, COLLECTIVE = 'kernel', 'copy', 'collective'
Stat = str | bytes | int | float
Ends = Mapping[tuple[str, Stat], float]  # (name, id) -> time of its `end: NAME` event


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """One operation of a device.

    On a GPU it is a kernel or copy of a stream; on the CPU, an HLO instruction on one of XLA's
    threads.

    Fields:
      name: name of the kernel (GPU) or instruction (CPU).
      operation: the name that it is counted under: `name` without the compiler's numbers, the
        instruction that a library runs (`cudnn-conv-bw-filter`), or one of our kernels
        (`jaxunet_...`).
      hlo: the instruction that it is part of; '' outside compiled programs.
      path: scopes and primitive of the instruction (`jaxunet.profile.hlo.Instruction`).
      kind: `kernel`, `copy` or `collective`.
      phase: one of `phases.PHASES`.
      backend: xla, pallas or cuda.
      start: nanoseconds; all events of a trace share one clock.
      duration: nanoseconds.
      device: number of the device.
      graph: True if it was launched as part of a CUDA graph.
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
    graph: bool

    @property
    def end(self) -> float:
        """End of the operation in nanoseconds."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An event of a host thread; `own` is its time in nanoseconds, without nested events."""

    name: str
    own: float


@dataclass(frozen=True)
class Trace:
    """The contents of a trace.

    Fields:
      platform: `gpu`, or `cpu` if the device operations ran on XLA's threads of the host.
      ops: operations of the devices.
      host: events of the host's threads, without device operations.
    """

    platform: str
    ops: list[DeviceOp]
    host: list[HostEvent]


@dataclass(frozen=True, slots=True)
class Event:
    """An event as the trace file stores it; times are in nanoseconds."""

    name: str
    start: float
    duration: float
    stats: Mapping[str, Stat]


Lines = Iterable[tuple[str, list[Event]]]  # name and events of each stream or thread


def read_trace(path: pathlib.Path, program: Program, steps: int) -> Trace:
    """Reads a trace that `jax.profiler` wrote.

    Args:
      path: the .xplane.pb file.
      program: the traced program (`read_hlo`), which has the scopes of the operations.
      steps: number of runs of the program.
    """
    with warnings.catch_warnings():
        # The reader's own classes warn under Python 3.13.
        warnings.simplefilter('ignore', DeprecationWarning)
        planes = [
            (
                plane.name,
                [(line.name, [_event(event) for event in line.events]) for line in plane.lines],
            )
            for plane in ProfileData.from_file(str(path)).planes
        ]
    return build_trace(planes, program, steps)


def _event(event: ProfileEvent) -> Event:
    return Event(event.name, event.start_ns, event.duration_ns, dict(event.stats))


def build_trace(planes: Iterable[tuple[str, Lines]], program: Program, steps: int) -> Trace:
    """Builds the trace from planes: (name of the plane, [(name of the line, its events)])."""
    gpu: list[DeviceOp] = []
    cpu: list[DeviceOp] = []
    host: list[HostEvent] = []
    for name, threads in planes:
        lines = list(threads)
        if device := _GPU.search(name):
            gpu += _gpu_ops(int(device[1]), lines, program, steps)
        elif name == '/host:CPU':
            ends: Ends = {
                (e.name[5:], e.stats['_c']): e.start
                for _, events in lines
                for e in events
                if e.name.startswith('end: ')
            }
            for _, events in lines:
                cpu += _cpu_ops(events, ends, program)
                host += _host_events(events)
    return Trace('gpu', gpu, host) if gpu else Trace('cpu', cpu, host)


def _gpu_ops(device: int, lines: Lines, program: Program, steps: int) -> list[DeviceOp]:
    # Lines other than streams repeat the same time by module or step.
    order = sorted(
        (e for line, events in lines if line.startswith('Stream') for e in events),
        key=lambda e: e.start,
    )
    aligned = _aligned(order, program, steps)
    ops = []
    for e in order:
        named = str(e.stats.get('hlo_op', ''))
        hlo = named if named in program.instructions else aligned.get(id(e), named)
        ops.append(_device_op(e, e.duration, device, hlo, program))
    return ops


def _aligned(events: Iterable[Event], program: Program, steps: int) -> dict[int, str]:
    """Returns the instructions of the kernels for which the trace names none, by `id` of the event.

    Returns {} if the steps do not all have the same number of such kernels, because a guess would
    be wrong.
    """
    own = [
        e for e in events if e.stats.get('hlo_module') == program.name and not is_collective(e.name)
    ]
    named = {e.stats.get('hlo_op') for e in own} & program.instructions.keys()
    hidden = [e for e in own if e.stats.get('hlo_op') not in named]
    if not hidden or len(hidden) % steps:
        return {}
    schedule = [
        name
        for name in program.schedule
        if name not in named and not is_collective(program.instructions[name].opcode)
    ]
    libraries = [program.instructions[name].opcode == 'custom-call' for name in schedule]
    aligned: dict[int, str] = {}
    by_kernels: dict[tuple[str, ...], list[str]] = {}  # a cache: most steps run the same kernels
    count = len(hidden) // steps
    for first in range(0, len(hidden), count):
        step = hidden[first : first + count]
        kernels = tuple(e.name for e in step)
        by_kernels[kernels] = by_kernels.get(kernels) or align(kernels, schedule, libraries)
        aligned |= {id(e): name for e, name in zip(step, by_kernels[kernels], strict=True)}
    return aligned


def _cpu_ops(events: list[Event], ends: Ends, program: Program) -> list[DeviceOp]:
    ops = []
    for e in events:
        if 'hlo_op' in e.stats and not _CONTAINER.match(e.name):
            # The event may only start the operation; other threads run it until `end: NAME`.
            end = max(e.start + e.duration, ends.get((e.name, e.stats.get('_p', '')), 0.0))
            device = int(e.stats.get('device_ordinal', 0))
            ops.append(_device_op(e, end - e.start, device, str(e.stats['hlo_op']), program))
    return ops


def _device_op(e: Event, duration: float, device: int, hlo: str, program: Program) -> DeviceOp:
    module = e.stats.get('hlo_module', '')
    known = program.instructions.get(hlo) if module == program.name else None
    path, opcode = (known.path, known.opcode) if known else ('', '')
    if is_collective(e.name, hlo, opcode):
        kind, phase = COLLECTIVE, ALL_REDUCE
    else:
        kind = COPY if is_copy(e.name) else KERNEL
        # A copy outside programs moves a batch to the device, or metrics back.
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
        graph=int(e.stats.get('cuda_graph_id', 0)) > 0,
    )


def _host_events(events: list[Event]) -> list[HostEvent]:
    """Returns the events of one thread with their `own` times, without device operations."""
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
        HostEvent(e.name, max(t, 0.0))
        for e, t in zip(order, own, strict=True)
        if 'hlo_op' not in e.stats
    ]
