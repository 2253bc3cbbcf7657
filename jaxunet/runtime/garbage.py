"""Sets Python's garbage collector aside while something is timed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_set_aside() -> Iterator[None]:
    """Keeps the garbage collector from scanning existing objects, which would distort timings."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
