"""Progress bars, for terminals and for log files."""

from __future__ import annotations

import sys

from tqdm import tqdm

LOG_SECONDS = 30.0  # between two lines of a bar in a log file


def progress_bar(**options: object) -> tqdm:
    """Returns a tqdm bar that prints every 30 s where stderr is not a terminal.

    On a terminal it is redrawn ten times a second.

    Args:
      options: keyword arguments of tqdm.
    """
    if not sys.stderr.isatty():
        # Both, because tqdm's monitor redraws a bar that is older than `maxinterval`.
        options = {'mininterval': LOG_SECONDS, 'maxinterval': LOG_SECONDS} | options
    return tqdm(dynamic_ncols=True, **options)
