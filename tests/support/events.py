"""Reads the event files of TensorBoard."""

from __future__ import annotations

import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event


def points(path: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The step and the values of each event of a file."""
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack('<Q', data[:8])
        event = Event.FromString(data[12 : 12 + size])
        found.append((event.step, {v.tag: v.simple_value for v in event.summary.value}))
        data = data[16 + size :]
    return found
