"""`Activation`: an NHWC array stored as one or more parts along channels."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """Returns the type for statistics, softmax and sums: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


class Activation(NamedTuple):
    """An NHWC activation: one or more parts, concatenated along channels.

    A skip connection joins two parts. A kernel reads both where they are, without a concatenated
    copy.
    """

    parts: tuple[Float[Array, 'batch height width _'], ...]

    @classmethod
    def of(cls, value: Float[Array, 'batch height width channels']) -> Activation:
        """Returns an activation of one part."""
        return cls((value,))

    def join(self, other: Activation) -> Activation:
        """Appends the other's channels; copies nothing."""
        return Activation(self.parts + other.parts)

    @property
    def value(self) -> Float[Array, 'batch height width channels']:
        """The activation as one array; several parts are concatenated."""
        return self.parts[0] if len(self.parts) == 1 else jnp.concatenate(self.parts, axis=-1)

    @property
    def channels(self) -> int:
        """Channels of all parts together."""
        return sum(part.shape[-1] for part in self.parts)

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the parts."""
        return self.parts[0].dtype
