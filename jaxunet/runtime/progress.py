"""Progress bars, for terminals, notebooks and log files."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0  # between two lines of a bar in a log file
NOTEBOOK_SECONDS = 0.5  # between two redraws of a bar of text in a notebook
_hidden = contextvars.ContextVar('bars are hidden', default=False)


class _Bar(tqdm):
    """A bar whose description ends with one colon.

    tqdm adds a colon to every description. For a bar without a total, `set_description` has already
    added one, so there would be two.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._silent = _hidden.get()
        super().__init__(*args, **options)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Replaces the text in front of the bar."""
        self.set_description_str(_plain(desc or ''), refresh)

    def write(self, text: str) -> None:
        """Prints a line above the bars, unless they are hidden."""
        if not self._silent:
            tqdm.write(text)


def _plain(desc: str) -> str:
    return desc.rstrip(': ')


def progress_bar(*, desc: str = '', **options: object) -> tqdm:
    """Returns a tqdm bar: a widget in a notebook that has ipywidgets, else text.

    On a terminal the text is redrawn ten times a second. Where stderr is neither a terminal nor of
    a notebook, it is printed every 30 s.

    Args:
      desc: text in front of the bar.
      options: other keyword arguments of tqdm.
    """
    if _hidden.get():
        options['disable'] = True
    if _in_notebook():
        options = {'mininterval': NOTEBOOK_SECONDS} | options
        return _notebook_bar()(desc=_plain(desc), **options)
    if not sys.stderr.isatty():
        # Both, because tqdm's monitor redraws a bar that is older than `maxinterval`.
        options = {'mininterval': LOG_SECONDS, 'maxinterval': LOG_SECONDS} | options
    return _Bar(desc=_plain(desc), dynamic_ncols=True, **options)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hides the bars that the block makes in this thread, and what is printed above them."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


def _in_notebook() -> bool:
    ipython = sys.modules.get('IPython')
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == 'ZMQInteractiveShell'


def _notebook_bar() -> type[tqdm]:
    if importlib.util.find_spec('ipywidgets') is None:
        return _Bar
    from tqdm.notebook import tqdm_notebook  # noqa: PLC0415 (only here)

    return type('_NotebookBar', (_Bar, tqdm_notebook), {})


def write_above_bars(handler: logging.Handler) -> None:
    """Makes a log handler that writes to stderr take the bars away while it writes.

    Otherwise a message would begin on the line of a bar, after it.
    """
    emit = handler.emit

    def without_bars(record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            emit(record)

    handler.emit = without_bars  # type: ignore[method-assign]
