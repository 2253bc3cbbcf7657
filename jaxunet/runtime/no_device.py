"""Recognizes the error of JAX if it finds no usable device, and says why and what to do."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import one_line

NO_DEVICE = 5  # exit code; another start may succeed, because other programs may free the GPU


class NoDeviceError(UserError):
    """JAX found no device that it can use."""

    exit_code = NO_DEVICE


def is_no_device(error: BaseException) -> bool:
    """Returns True for an exception that JAX raises if none of its backends can start."""
    if isinstance(error, RuntimeError) and 'Unable to initialize backend' in str(error):
        return True
    # JAX asserts that at least one backend has started.
    frames = traceback.extract_tb(error.__traceback__)
    in_start = (
        bool(frames) and frames[-1].name == 'backends' and 'xla_bridge' in frames[-1].filename
    )
    return isinstance(error, AssertionError) and in_start


def no_device_error(error: BaseException) -> NoDeviceError:
    """Returns an error with a one-line message for an exception of `is_no_device`."""
    platforms = os.environ.get('JAX_PLATFORMS', '')
    text = str(error).partition(' (set JAX_PLATFORMS')[0].rstrip('.')
    return NoDeviceError(
        'JAX found no device that it can use'
        + (f' (JAX_PLATFORMS={platforms})' if platforms else '')
        + (f': {one_line(text)}' if text else '')
        + '; if this machine has a GPU, install jaxunet with ".[cuda13]" and see that other '
        'processes leave memory (nvidia-smi); JAX_PLATFORMS=cpu computes on the CPU'
    )


@contextlib.contextmanager
def needs_device() -> Iterator[None]:
    """Turns an exception of the block into a `NoDeviceError` if JAX could not start in it."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if not is_no_device(error):
            raise
        raise no_device_error(error) from None
