"""Writes TensorBoard's event files in the loop's thread; an error is only a warning.

tensorboardX's own writer has a thread. An exception there, such as for a full disk, would end it,
and the training loop would then wait for it forever.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping

import numpy as np
from tensorboardX import record_writer, summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxunet.runtime.attempts import PatientFile

PREFIX = 'patient'  # tensorboardX chooses the kind of a file by the prefix of its path


class Board:
    """A new event file in a folder. Failing to write it is only a warning.

    Args:
      start_step: the step that the run starts from; TensorBoard hides later steps of earlier files.
    """

    def __init__(self, folder: pathlib.Path, start_step: int) -> None:
        self._events = EventsWriter(f'{PREFIX}:{folder / "events"}')
        self._add(start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve: a value by the name of the curve."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=points))

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """Adds a picture: uint8 (height, width, 1 or 3)."""
        rgb = np.broadcast_to(picture, (*picture.shape[:2], 3))
        self._add(step, summary=summary.image(name, rgb, dataformats='HWC'))

    def _add(self, step: int, **content: object) -> None:
        self._events.write_event(Event(step=step, wall_time=time.time(), **content))
        self._events.flush()


class _Files:
    """Makes the files whose paths begin with `PREFIX`."""

    @staticmethod
    def open(path: str) -> _EventFile:
        """Returns a new event file."""
        return _EventFile(pathlib.Path(path.removeprefix(f'{PREFIX}:')))


class _EventFile:
    """Keeps the pieces of an event, and writes them together."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file, self._pieces = PatientFile(path), list[bytes]()

    def write(self, data: bytes) -> None:
        """Keeps a piece."""
        self._pieces.append(data)

    def flush(self) -> None:
        """Writes the pieces."""
        pieces, self._pieces = self._pieces, []
        self._file.write(b''.join(pieces))


record_writer.register_writer_factory(PREFIX, _Files)
