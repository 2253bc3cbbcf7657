"""Recognizes that a device or this machine has no memory left, and says what to lower."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import one_line

OUT_OF_MEMORY = 3  # exit code; another start may succeed, because other programs may free memory
# Kernels that need more shared memory than a GPU has also raise RESOURCE_EXHAUSTED.
MESSAGE = re.compile(
    r'RESOURCE_EXHAUSTED.*(out of memory|allocat)|CUDA_ERROR_OUT_OF_MEMORY', re.I | re.S
)


class OutOfMemoryError(UserError):
    """A device or this machine had no memory left for what the config or the flags ask for."""

    exit_code = OUT_OF_MEMORY


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for JAX's error for a device without memory, and for Python's MemoryError."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return MESSAGE.search(str(error)) is not None
    return isinstance(error, MemoryError)


def out_of_memory_error(error: BaseException, what: str, advice: str) -> OutOfMemoryError:
    """Returns an error with a one-line message for an exception of `is_out_of_memory`.

    Args:
      what: what needed the memory; begins the message.
      advice: what to lower; ends the message.
    """
    place = 'this machine' if isinstance(error, MemoryError) else 'the device'
    reason = one_line(str(error).strip().partition('\n')[0] or type(error).__name__)
    return OutOfMemoryError(f'{what}: {place} has no memory left ({reason}); {advice}')


@contextlib.contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Turns an exception of the block into an `OutOfMemoryError` if memory was the reason.

    Args:
      what, advice: see `out_of_memory_error`.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, what, advice) from None
