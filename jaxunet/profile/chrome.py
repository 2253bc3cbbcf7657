"""Writes the Chrome trace of a profile: the file from JAX, with the phases as extra tracks."""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
from collections.abc import Iterator

from jaxunet.profile.events import DeviceOp, Trace

Entry = dict[str, object]  # one event of the Chrome trace format


def write_trace(source: pathlib.Path, trace: Trace, destination: pathlib.Path) -> None:
    """Copies a Chrome trace (gzip JSON) and adds a process `phases` with a thread for each device.

    Args:
      source: the file that JAX wrote.
      trace: the operations of the same run.
      destination: the new file, for chrome://tracing and ui.perfetto.dev.

    Raises:
      OSError: a file cannot be read or written.
    """
    with gzip.open(source, 'rt', encoding='utf-8') as file:
        content = json.load(file)
    # JAX ends the list with an empty event.
    events = content['traceEvents'] = [event for event in content['traceEvents'] if event]
    process = 1 + max((event.get('pid', 0) for event in events), default=0)
    events += phase_events(trace, process)
    with gzip.open(destination, 'wt', encoding='utf-8') as file:
        json.dump(content, file)


def phase_events(trace: Trace, process: int) -> Iterator[Entry]:
    """Yields the Chrome events of the phase tracks, under the process id `process`."""
    yield {'ph': 'M', 'pid': process, 'name': 'process_name', 'args': {'name': 'phases'}}
    for device in sorted({op.device for op in trace.ops}):
        track: Entry = {'pid': process, 'tid': device}
        label = f'{trace.platform.upper()} {device}'
        yield {'ph': 'M', **track, 'name': 'thread_name', 'args': {'name': label}}
        for phase, start, end in phase_spans([op for op in trace.ops if op.device == device]):
            # Chrome traces count in microseconds.
            yield {'ph': 'X', **track, 'name': phase, 'ts': start / 1e3, 'dur': (end - start) / 1e3}


def phase_spans(ops: list[DeviceOp]) -> Iterator[tuple[str, float, float]]:
    """Yields (phase, start, end) in nanoseconds for each run of operations of one phase.

    Runs come in the order of their starts; each ends no later than the next one starts.
    """
    runs = [
        (phase, list(run))
        for phase, run in itertools.groupby(
            sorted(ops, key=lambda op: op.start), key=lambda op: op.phase
        )
    ]
    starts = [run[0].start for _, run in runs]
    for (phase, run), following in zip(runs, [*starts[1:], float('inf')], strict=True):
        yield phase, run[0].start, min(max(op.end for op in run), following)
