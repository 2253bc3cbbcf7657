"""The reference of attention for parity tests of every backend."""

from __future__ import annotations

import functools

from jaxunet.ops.attention import reference


@functools.cache  # so that equal references are known to be equal
def plain(heads: int):
    """Returns the reference as a function of the packed array alone."""
    return functools.partial(reference.attention, num_heads=heads)
