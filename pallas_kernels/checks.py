"""The checks that all ops of the package make, and all of its tuning programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from jaxtyping import Array

from jaxunet.ops.transformations import is_checked
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError

DTYPES = ('bfloat16', 'float16', 'float32')  # of activations


def check_shard_map(op: str) -> None:
    """Checks that no surrounding `jax.shard_map` tracks how results vary over the devices.

    Raises:
      ValueError: it has `check_vma=True`, for which Pallas's calls have no rule.
    """
    if is_checked():
        raise ValueError(
            f'{op}: the Pallas kernels run under jax.shard_map with check_vma=False only; '
            f'pass that, or use the cuda or xla backend'
        )


def check_not_empty(op: str, name: str, value: Array) -> None:
    """Checks that an operand has elements.

    Raises:
      ValueError: it has no samples, or no pixels or tokens.
    """
    if not value.size:
        raise ValueError(
            f'{op}: {name}: shape {list(value.shape)}; the Pallas kernels take at least one sample '
            'and one pixel or token; use the cuda or xla backend'
        )


def check_gpu(*, hopper: bool = False) -> None:
    """Ends a tuning program, with a message, unless this machine's GPU runs the kernels.

    Args:
      hopper: the program times kernels that only Hopper has.

    Raises:
      SystemExit: there is no such GPU, or JAXUNET_KERNELS excludes its kernels.
    """
    try:
        target = device.target()
    except (device.UnsupportedDeviceError, UserError) as error:
        sys.exit(f'error: {error}')
    if hopper and target is not device.Target.HOPPER:
        sys.exit(
            f'error: expected a GPU of compute capability 9.0 without {device.VARIABLE}, '
            f'found {device.label()}'
        )


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a `type` of argparse: some of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(',')
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f'expected some of {", ".join(known)}, found {", ".join(unknown)}'
            )
        return names

    return parse
