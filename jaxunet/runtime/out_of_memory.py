"""Recognizes that a device or this machine has no memory left, and says what to lower."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator

import jax
from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import one_line

OUT_OF_MEMORY = 3  # exit code; another start may succeed, because other programs may free memory
# Kernels that need more shared memory than a GPU has also raise RESOURCE_EXHAUSTED.
MESSAGE = re.compile(
    r'RESOURCE_EXHAUSTED.*(out of memory|allocat)|CUDA_ERROR_OUT_OF_MEMORY', re.I | re.S
)

NO_THREAD = "can't start new thread"  # Python's message
ADDRESSES = 4 * 2**30  # bytes of address space with which the smallest run works on a CPU


class OutOfMemoryError(UserError):
    """A device or this machine had no memory left for what the config or the flags ask for."""

    exit_code = OUT_OF_MEMORY


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for errors for lack of memory: JAX's, MemoryError, and that of a thread.

    A thread needs memory for its stack; a limit of processes also limits threads.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return MESSAGE.search(str(error)) is not None
    return isinstance(error, MemoryError) or _is_thread(error)


def _is_thread(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and str(error) == NO_THREAD


def warn_of_small_limit() -> None:
    """Warns of a limit (ulimit -v) at which XLA may abort the process without an exception."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESSES:
        logging.warning(
            'ulimit -v: expected unlimited or at least %.0f GiB, found %.1f GiB; XLA reserves more '
            'than it uses, and ends the process by SIGABRT where that is refused',
            ADDRESSES / 2**30,
            limit / 2**30,
        )


def out_of_memory_error(error: BaseException, what: str, advice: str) -> OutOfMemoryError:
    """Returns an error with a one-line message for an exception of `is_out_of_memory`.

    Args:
      what: what needed the memory; begins the message.
      advice: what to lower; ends the message.
    """
    reason = one_line(str(error).strip().partition('\n')[0] or type(error).__name__)
    if _is_thread(error):
        return OutOfMemoryError(
            f'{what}: this machine has no memory or threads left ({reason}); raise the limit of '
            f'processes (ulimit -u, the pids limit of a container) or of memory, or {advice}'
        )
    place = 'this machine' if isinstance(error, MemoryError) else 'the device'
    return OutOfMemoryError(f'{what}: {place} has no memory left ({reason}); {advice}')


@contextlib.contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Turns an exception of the block into an `OutOfMemoryError` if memory was the reason.

    Args:
      what, advice: see `out_of_memory_error`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # JaxRuntimeError is one
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, what, advice) from None
