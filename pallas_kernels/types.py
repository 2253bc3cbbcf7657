"""Types that the kernels share."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike

Ref = Any  # a reference to device or shared memory, or barriers; Pallas has no public type for them
Index = Any  # an int or a traced int32
Slice = Any  # the result of `pl.ds`
Layout = Any  # how Mosaic GPU spreads an array over the registers of a warpgroup


@runtime_checkable
class Shaped(Protocol):
    """An array, or an abstract one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the axes."""
        ...

    @property
    def dtype(self) -> DTypeLike:
        """The type of the elements."""
        ...
