"""Writes TensorBoard's event files in the loop's thread; an error is only a warning.

tensorboardX's own writer has a thread. An exception there, such as for a full disk, would end it,
and the training loop would then wait for it forever.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from jaxunet.runtime.attempts import PatientFile
from jaxunet.training.loggers.interface import Logger, RunStart

FOLDER = 'tensorboard'  # in the workdir


class TensorBoard(Logger):
    """A new event file for each start. Failing to write it is only a warning."""

    in_loop = True

    def start(self, run: RunStart) -> None:
        """Begins a file, which makes TensorBoard hide later steps of earlier files."""
        name = f'events.out.tfevents.{int(time.time())}.{socket.gethostname()}'
        path = run.workdir / FOLDER / name
        self._file = PatientFile(path, start=_record(file_version='brain.Event:2'))
        self._add(run.step + 1, session_log=SessionLog(status=SessionLog.START))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=points))

    def image(self, step: int, name: str, picture: np.ndarray) -> None:
        """Adds a picture: uint8 (height, width, 1 or 3)."""
        rgb = np.broadcast_to(picture, (*picture.shape[:2], 3))
        self._add(step, summary=summary.image(name, rgb, dataformats='HWC'))

    def _add(self, step: int, **content: object) -> None:
        self._file.write(_record(step=step, **content))


def _record(**content: object) -> bytes:
    """Returns an event in TFRecord's format: its length and its bytes, each with a checksum."""
    event = Event(wall_time=time.time(), **content).SerializeToString()
    length = struct.pack('<Q', len(event))
    sums = [struct.pack('<I', masked_crc32c(data)) for data in (length, event)]
    return length + sums[0] + event + sums[1]
