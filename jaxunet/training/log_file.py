"""Keeps what a run logs in `WORKDIR/log.txt`, each start after a line with its time and command."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from typing import IO

from absl.logging import get_absl_logger

from jaxunet.runtime.errors import printable_lines
from jaxunet.runtime.file_errors import check_regular

FILE = 'log.txt'
MARK = '### '  # begins the line of a start
SHOWN = 40  # lines of a start that `last_start` returns
TAIL = 1 << 20  # bytes of a log that it reads


class LogFile(logging.Handler):
    """A handler that keeps messages in memory until `open` names their file.

    What a full disk refuses is lost: the same messages are on stderr.

    Args:
      command: the command line, for the log.
    """

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command
        self._early: list[str] = []
        self._file: IO[bytes] | None = None  # stays open, so that it moves with its folder

    def open(self, workdir: pathlib.Path) -> None:
        """Appends the messages so far, and from now on each at once, to the log of a run.

        Raises:
          OSError: the file cannot be opened.
        """
        if self._file is not None:
            return
        check_regular(workdir / FILE)
        self._file = (workdir / FILE).open('ab', buffering=0)
        begun = f'{MARK}{time.strftime("%Y-%m-%d %H:%M:%S")} {self._command}\n'
        self._write(''.join([begun, *self._early]))
        self._early.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes one message."""
        line = f'{printable_lines(record.getMessage())}\n'
        if self._file is None:
            self._early.append(line)
        else:
            self._write(line)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        super().close()

    def _write(self, text: str) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError, ValueError):  # a full disk; closed
            self._file.write(text.encode('utf-8', 'backslashreplace'))


def open_logs(workdir: pathlib.Path) -> None:
    """Has the handlers of this process, if there are any, write to the log of a run.

    Raises:
      OSError: the file cannot be opened.
    """
    for handler in get_absl_logger().handlers:
        if isinstance(handler, LogFile):
            handler.open(workdir)


def last_start(workdir: pathlib.Path) -> list[str]:
    """Returns the first lines of the last start in the log of a run; [] without a log."""
    try:
        with (workdir / FILE).open('rb') as file:
            file.seek(max(file.seek(0, 2) - TAIL, 0))
            lines = file.read().decode('utf-8', 'replace').splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if line.startswith(MARK)]
    return [line.removeprefix(MARK) for line in lines[starts[-1] if starts else 0 :][:SHOWN]]
