"""What a trace amounts to, per training step and device: time by phase and operation, launches, idle share, overlap of collectives."""

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

_HOST_NUMBERS = re.compile(r'^\[\d+\] | \(\w+:\d+\)$')  # of the device, of a graph
GRAPH_LAUNCH = 'cuGraphLaunch'
DEVICE, HOST = 'device', 'host'


@dataclass(frozen=True)
class Row:
    """Operations of one kind, name, phase and backend, taken together.

    Fields:
      side: `device` or `host`. kind: of the device's, `kernel`, `copy` or `collective`; '' on the host.
      operation: see `DeviceOp`; on the host the name, without numbers.
      phase, backend: of `PHASES`, and xla, pallas or cuda; '' on the host.
      count: how many a step. ms: their time a step. share: of the device's busy time, or of all time that host threads were traced.
      place: the module, and kernel: the full name of the kernel, that most of the time was spent for; '' on the host.
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
    """A trace in numbers, each per step and (but for `devices`) a mean over the devices.

    Fields:
      window_ms: from the first operation to the end of the last. busy_ms: of which any operation ran. idle_share: 1 - busy / window.
      launches: kernels, collectives included. copies: copies and fills.
      graph_launches: launches of CUDA graphs. in_graphs: kernels and copies that these consist of.
      phase_ms: time of the operations by phase, in the order of `PHASES`; operations that run at once count each.
      collective_ms: time in collectives. overlapped_share: of which other operations ran; None without collectives.
      rows: by falling time, the device's before the host's.
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
        return [row for row in self.rows if row.side == side]


def summarise(trace: Trace, steps: int) -> Summary:
    """Takes a trace of `steps` steps together. The trace must have device operations."""
    by_device: dict[int, list[DeviceOp]] = collections.defaultdict(list)
    for op in trace.ops:
        by_device[op.device].append(op)
    devices = len(by_device)
    each = 1e-6 / (steps * devices)  # from nanoseconds of all to milliseconds a step and device
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
        launches=(len(trace.ops) - copies) / (steps * devices),
        copies=copies / (steps * devices),
        graph_launches=sum(event.name.startswith(GRAPH_LAUNCH) for event in trace.host)
        / (steps * devices),
        in_graphs=sum(op.graph for op in trace.ops) / (steps * devices),
        phase_ms={
            phase: sum(op.duration for op in trace.ops if op.phase == phase) * each
            for phase in PHASES
        },
        collective_ms=communicating * each,
        overlapped_share=overlapped / communicating if communicating else None,
        rows=device_rows(trace.ops, steps * devices) + host_rows(trace.host, steps),
    )


def spans(ops: Iterable[DeviceOp]) -> Intervals:
    """Starts and ends, (n, 2)."""
    return np.array([(op.start, op.end) for op in ops], np.float64).reshape(-1, 2)


def device_rows(ops: Sequence[DeviceOp], divisor: int) -> list[Row]:
    """The operations by name, phase and backend, longest first; counts and times are divided by `divisor`."""
    groups: dict[tuple[str, str, str, str], list[DeviceOp]] = collections.defaultdict(list)
    for op in ops:
        groups[op.kind, op.operation, op.phase, op.backend].append(op)
    total = sum(op.duration for op in ops) or 1.0
    rows = []
    for (kind, name, phase, backend), members in groups.items():
        time = sum(op.duration for op in members)
        place, kernel = (
            _longest((module_of(op.path), op.duration) for op in members),
            _longest((op.name, op.duration) for op in members),
        )
        rows.append(
            Row(
                DEVICE,
                kind,
                name,
                phase,
                backend,
                len(members) / divisor,
                time * 1e-6 / divisor,
                time / total,
                place,
                kernel,
            )
        )
    return sorted(rows, key=lambda row: -row.ms)


def host_rows(events: Sequence[HostEvent], divisor: int) -> list[Row]:
    """What the host's threads did, by name, longest own time first."""
    groups: dict[str, list[HostEvent]] = collections.defaultdict(list)
    for event in events:
        groups[stem(_HOST_NUMBERS.sub('', event.name))].append(event)
    total = sum(event.own for event in events) or 1.0
    rows = []
    for name, members in groups.items():
        own = sum(event.own for event in members)
        rows.append(
            Row(
                HOST,
                '',
                name,
                '',
                '',
                len(members) / divisor,
                own * 1e-6 / divisor,
                own / total,
                '',
                '',
            )
        )
    return sorted(rows, key=lambda row: -row.ms)


def _longest(durations: Iterable[tuple[str, float]]) -> str:
    """The name with the most time."""
    total: dict[str, float] = collections.defaultdict(float)
    for name, duration in durations:
        total[name] += duration
    return max(total, key=lambda name: total[name])
