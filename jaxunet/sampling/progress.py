"""Counts the samples of one output, which several processes may draw."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import jax

from jaxunet.runtime.progress import progress_bar
from jaxunet.sampling.partial_output import Parts

LOOK_SECONDS = 1.0  # between looks for the batches of other processes


@contextlib.contextmanager
def counted(parts: Parts, count: int) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar of all samples on process 0, and gives the function that updates it.

    The function takes the number of samples drawn so far in the current batch, which may be a
    fraction. All others count once they are stored, whichever process draws them.

    Args:
      parts: the finished samples.
      count: all samples of the output.
    """

    def stored() -> int:
        return count - sum(stop - start for start, stop in parts.missing(0, count, count))

    looked, before, last = time.monotonic(), stored(), 0.0
    with progress_bar(
        total=count,
        initial=before,
        unit='image',
        bar_format='{l_bar}{bar}| {n:.0f}/{total} [{elapsed}<{remaining}]',
        disable=jax.process_index() > 0,
    ) as bar:

        def update(drawn: float) -> None:
            nonlocal looked, before, last
            if bar.disable:
                return
            # The last batch is stored when the next one begins.
            if drawn <= last or time.monotonic() >= looked + LOOK_SECONDS:
                looked, before = time.monotonic(), stored()
            last = drawn
            bar.update(before + drawn - bar.n)

        yield update
