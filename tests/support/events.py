"""Reads the event files of TensorBoard."""

from __future__ import annotations

import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog


def points(path: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The step and the values of each event of a file."""
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in _events(path)
    ]


def shown_steps(folder: pathlib.Path) -> list[int]:
    """The steps of the points that TensorBoard shows of all files: a start drops later steps."""
    steps: list[int] = []
    for path in sorted(folder.iterdir()):
        for event in _events(path):
            if event.session_log.status == SessionLog.START:
                steps = [step for step in steps if step < event.step]
            steps += [event.step] if event.summary.value else []
    return steps


def _events(path: pathlib.Path) -> list[Event]:
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack('<Q', data[:8])
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found
