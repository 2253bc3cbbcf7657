"""The size of a Hopper kernel's grid: the GPU's multiprocessors, and counts of tiles."""

from __future__ import annotations

from jaxunet.runtime import device

SXM_MULTIPROCESSORS = 132  # on an H100 or H200 SXM


def multiprocessors() -> int:
    """Returns the multiprocessors of the GPU that is traced for; if it is unknown, an H200's."""
    return device.multiprocessors(SXM_MULTIPROCESSORS)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
