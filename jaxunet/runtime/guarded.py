"""Turns what goes wrong on a machine into `UserError`s, for commands and for Python programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxunet.runtime.file_errors import explained
from jaxunet.runtime.jax_settings import fixed_jax_settings
from jaxunet.runtime.no_device import needs_device
from jaxunet.runtime.out_of_memory import memory_for

MORE_MEMORY = 'lower its batch size, or use a device or a machine with more memory'


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """Runs the block with jaxunet's types; also a decorator.

    Lack of memory or of a device, or a file that the system refuses, becomes a `UserError`.

    Args:
      what: needs the memory, for the message.
    """
    with fixed_jax_settings(), needs_device(), memory_for(what, MORE_MEMORY), explained():
        yield
