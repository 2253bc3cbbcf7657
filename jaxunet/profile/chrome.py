"""The trace file that chrome://tracing and ui.perfetto.dev open: what jax wrote, with the phases as tracks of their own."""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxunet.profile.events import DeviceOp, Trace


def write_trace(source: pathlib.Path, trace: Trace, destination: pathlib.Path) -> None:
    """Copies a Chrome trace (gzip JSON) of jax and adds a process `phases`, whose threads are the devices. Raises `OSError`."""
    with gzip.open(source, 'rt', encoding='utf-8') as file:
        content = json.load(file)
    events = content['traceEvents'] = [
        event for event in content['traceEvents'] if event
    ]  # jax ends the list with an empty one
    process = 1 + max((event.get('pid', 0) for event in events), default=0)
    added: list[dict[str, Any]] = [
        {'ph': 'M', 'pid': process, 'name': 'process_name', 'args': {'name': 'phases'}}
    ]
    for device in sorted({op.device for op in trace.ops}):
        names = {'pid': process, 'tid': device}
        added.append(
            {
                'ph': 'M',
                **names,
                'name': 'thread_name',
                'args': {'name': f'{trace.platform.upper()} {device}'},
            }
        )
        for phase, start, end in phase_spans([op for op in trace.ops if op.device == device]):
            added.append(
                {'ph': 'X', **names, 'name': phase, 'ts': start / 1e3, 'dur': (end - start) / 1e3}
            )
    events += added
    with gzip.open(destination, 'wt', encoding='utf-8') as file:
        json.dump(content, file)


def phase_spans(ops: list[DeviceOp]) -> Iterator[tuple[str, float, float]]:
    """(phase, start, end), nanoseconds: runs of operations of one phase, in the order of their starts, none reaching into the next."""
    runs = [
        (phase, list(run))
        for phase, run in itertools.groupby(
            sorted(ops, key=lambda op: op.start), key=lambda op: op.phase
        )
    ]
    starts = [run[0].start for _, run in runs]
    for (phase, run), following in zip(runs, [*starts[1:], float('inf')], strict=True):
        yield phase, run[0].start, min(max(op.end for op in run), following)
