"""Progress bars, for terminals and for log files."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

LOG_SECONDS = 30.0  # between two lines of a bar in a log file


class _Bar(tqdm):
    """A bar whose description ends with one colon.

    tqdm adds a colon to every description. For a bar without a total, `set_description` has already
    added one, so there would be two.
    """

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Replaces the text in front of the bar."""
        self.set_description_str(_plain(desc or ''), refresh)


def _plain(desc: str) -> str:
    return desc.rstrip(': ')


def progress_bar(*, desc: str = '', **options: object) -> tqdm:
    """Returns a tqdm bar that prints every 30 s where stderr is not a terminal.

    On a terminal it is redrawn ten times a second.

    Args:
      desc: text in front of the bar.
      options: other keyword arguments of tqdm.
    """
    if not sys.stderr.isatty():
        # Both, because tqdm's monitor redraws a bar that is older than `maxinterval`.
        options = {'mininterval': LOG_SECONDS, 'maxinterval': LOG_SECONDS} | options
    return _Bar(desc=_plain(desc), dynamic_ncols=True, **options)


def write_above_bars(handler: logging.Handler) -> None:
    """Makes a log handler that writes to stderr take the bars away while it writes.

    Otherwise a message would begin on the line of a bar, after it.
    """
    emit = handler.emit

    def without_bars(record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            emit(record)

    handler.emit = without_bars  # type: ignore[method-assign]
