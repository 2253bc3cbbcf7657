"""Sums up a trace per training step and device.

The numbers are the time by phase and operation, launches, the idle share and the overlap of
collectives.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxunet.profile import intervals
from jaxunet.profile.align import stem
from jaxunet.profile.events import COLLECTIVE, COPY, DeviceOp, HostEvent, Trace
from jaxunet.profile.intervals import Intervals
from jaxunet.profile.phases import PHASES, module_of

_HOST_NUMBERS = re.compile(r'^\[\d+\] | \(\w+:\d+\)$')  # numbers of the device and of a graph
GRAPH_LAUNCH = 'cuGraphLaunch'
DEVICE, HOST = 'device', 'host'
# (kind, operation, phase, backend) -> (nanoseconds, place, kernel) of each operation
Groups = dict[tuple[str, str, str, str], list[tuple[float, str, str]]]


@dataclass(frozen=True)
class Row:
    """All operations of one kind, name, phase and backend.

    Fields:
      side: `device` or `host`.
      kind: `kernel`, `copy` or `collective`; '' on the host.
      operation: see `DeviceOp`; on the host, the event's name without numbers.
      phase: one of `PHASES`; '' on the host.
      backend: xla, pallas or cuda; '' on the host.
      count: operations per step.
      ms: milliseconds per step.
      share: fraction of the time of all device operations, or of all traced time of host threads.
      place: the module of the model with most of the time; '' on the host.
      kernel: the full name of the kernel that took most of the time; '' on the host.
    """

    side: str
    kind: str
    operation: str
    phase: str
    backend: str
    count: float
    ms: float
    share: float
    place: str
    kernel: str


@dataclass(frozen=True)
class Summary:
    """The numbers of a trace, per step and as means over the devices.

    Fields:
      platform: `gpu` or `cpu`.
      devices: number of devices.
      steps: number of traced steps.
      window_ms: time from the first operation to the end of the last.
      busy_ms: time in which any operation ran.
      idle_share: 1 - busy / window.
      launches: kernels, including collectives.
      copies: copies and fills.
      graph_launches: launches of CUDA graphs.
      in_graphs: kernels and copies within these graphs.
      phase_ms: time of the operations by phase, in the order of `PHASES`; simultaneous operations
        all count.
      collective_ms: time in collectives.
      overlapped_share: part of `collective_ms` in which other operations ran; None without
        collectives.
      rows: the operations, device before host, longest first.
    """

    platform: str
    devices: int
    steps: int
    window_ms: float
    busy_ms: float
    idle_share: float
    launches: float
    copies: float
    graph_launches: float
    in_graphs: float
    phase_ms: dict[str, float]
    collective_ms: float
    overlapped_share: float | None
    rows: list[Row]

    def side(self, side: str) -> list[Row]:
        """Returns the rows of `DEVICE` or `HOST`."""
        return [row for row in self.rows if row.side == side]


def summarise(trace: Trace, steps: int) -> Summary:
    """Sums up a trace of `steps` steps, which must have device operations."""
    by_device: dict[int, list[DeviceOp]] = collections.defaultdict(list)
    for op in trace.ops:
        by_device[op.device].append(op)
    devices = len(by_device)
    runs = steps * devices
    each = 1e-6 / runs  # from nanoseconds of the whole trace to milliseconds per step and device
    windows = [
        max(op.end for op in ops) - min(op.start for op in ops) for ops in by_device.values()
    ]
    busy = [intervals.length(spans(ops)) for ops in by_device.values()]
    collectives = [spans(op for op in ops if op.kind == COLLECTIVE) for ops in by_device.values()]
    compute = [spans(op for op in ops if op.kind != COLLECTIVE) for ops in by_device.values()]
    communicating = sum(intervals.length(c) for c in collectives)
    overlapped = sum(intervals.overlap(c, k) for c, k in zip(collectives, compute, strict=True))
    copies = sum(op.kind == COPY for op in trace.ops)
    return Summary(
        platform=trace.platform,
        devices=devices,
        steps=steps,
        window_ms=sum(windows) * each,
        busy_ms=sum(busy) * each,
        idle_share=1 - sum(busy) / sum(windows),
        launches=(len(trace.ops) - copies) / runs,
        copies=copies / runs,
        graph_launches=sum(event.name.startswith(GRAPH_LAUNCH) for event in trace.host) / runs,
        in_graphs=sum(op.graph for op in trace.ops) / runs,
        phase_ms={
            phase: sum(op.duration for op in trace.ops if op.phase == phase) * each
            for phase in PHASES
        },
        collective_ms=communicating * each,
        overlapped_share=overlapped / communicating if communicating else None,
        rows=device_rows(trace.ops, runs) + host_rows(trace.host, steps),
    )


def spans(ops: Iterable[DeviceOp]) -> Intervals:
    """Returns the starts and ends of the operations in nanoseconds, (n, 2)."""
    return np.array([(op.start, op.end) for op in ops], np.float64).reshape(-1, 2)


def device_rows(ops: Sequence[DeviceOp], divisor: int) -> list[Row]:
    """Returns the operations by kind, name, phase and backend, longest first.

    Args:
      ops: operations of all devices.
      divisor: number that counts and times are divided by (steps × devices).
    """
    groups: Groups = collections.defaultdict(list)
    for op in ops:
        key = op.kind, op.operation, op.phase, op.backend
        groups[key].append((op.duration, module_of(op.path), op.name))
    return _rows(DEVICE, groups, divisor)


def host_rows(events: Sequence[HostEvent], divisor: int) -> list[Row]:
    """Returns the events of the host's threads by name, longest own time first.

    Args:
      events: events of all threads.
      divisor: number that counts and times are divided by (steps).
    """
    groups: Groups = collections.defaultdict(list)
    for event in events:
        groups['', stem(_HOST_NUMBERS.sub('', event.name)), '', ''].append((event.own, '', ''))
    return _rows(HOST, groups, divisor)


def _rows(side: str, groups: Groups, divisor: int) -> list[Row]:
    total = sum(time for members in groups.values() for time, _, _ in members) or 1.0
    rows = []
    for (kind, name, phase, backend), members in groups.items():
        time = sum(time for time, _, _ in members)
        row = Row(
            side=side,
            kind=kind,
            operation=name,
            phase=phase,
            backend=backend,
            count=len(members) / divisor,
            ms=time * 1e-6 / divisor,
            share=time / total,
            place=_longest((place, time) for time, place, _ in members),
            kernel=_longest((kernel, time) for time, _, kernel in members),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.ms)


def _longest(durations: Iterable[tuple[str, float]]) -> str:
    """Returns the name with the most time."""
    total: dict[str, float] = collections.defaultdict(float)
    for name, duration in durations:
        total[name] += duration
    return max(total, key=lambda name: total[name])
