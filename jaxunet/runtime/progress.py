"""Progress bars, for terminals and for log files."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0  # between two states of a bar where nobody watches it move


def progress_bar(**options: Any) -> tqdm:
    """tqdm's bar; where stderr is no terminal, such as a cluster's log file, it is drawn every 30 s instead of ten times a second.

    Args:
      options: tqdm's.
    """
    if not sys.stderr.isatty():
        # Above `maxinterval` tqdm's monitor draws it anyway.
        options = {'mininterval': LOG_SECONDS, 'maxinterval': LOG_SECONDS} | options
    return tqdm(dynamic_ncols=True, **options)
