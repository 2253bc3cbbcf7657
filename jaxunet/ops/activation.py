"""`Activation`: the activation that ops exchange, kept as the parts whose channels it joins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The type in which statistics, softmax and sums are computed: float32, or float64 where that is what comes in."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


class Activation(NamedTuple):
    """An NHWC activation as one or more parts that are concatenated along channels, each with its moments where known.

    A skip connection joins two parts; a kernel may read both where they are instead of a concatenated copy. `moments[i]` is
    what the producer of `parts[i]` already knows of it: float32 of shape (batch, channels, 2), mean and mean squared deviation
    over the pixels of each sample and channel, or None.
    """

    parts: tuple[Float[Array, 'batch height width _'], ...]
    moments: tuple[Float[Array, 'batch _ 2'] | None, ...]

    @classmethod
    def of(
        cls,
        value: Float[Array, 'batch height width channels'],
        moments: Float[Array, 'batch channels 2'] | None = None,
    ) -> Activation:
        return cls((value,), (moments,))

    def join(self, other: Activation) -> Activation:
        """Both, one after the other along channels; nothing is copied."""
        return Activation(self.parts + other.parts, self.moments + other.moments)

    @property
    def value(self) -> Float[Array, 'batch height width channels']:
        """The activation as one array."""
        return self.parts[0] if len(self.parts) == 1 else jnp.concatenate(self.parts, axis=-1)

    @property
    def channels(self) -> int:
        return sum(part.shape[-1] for part in self.parts)

    @property
    def zero_moments(self) -> tuple[Float[Array, 'batch _ 2'] | None, ...]:
        """Zeros where moments are known: their gradient, where that of a part is the whole one."""
        return tuple(None if known is None else jnp.zeros_like(known) for known in self.moments)

    @property
    def dtype(self) -> jnp.dtype:
        return self.parts[0].dtype


def channel_moments(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch channels 2']:
    """Mean and mean squared deviation over the pixels of each sample and channel, in at least float32.

    Two passes, so that a large mean does not cancel the variance away. bfloat16 needs only one, E[x²] − E[x]²: its squares are exact in
    float32, and a mean large enough to cancel would have rounded the deviations away when x was stored.
    """
    wide = x.astype(at_least_float32(x.dtype))
    mean = jnp.mean(wide, axis=(1, 2))
    if x.dtype == jnp.bfloat16:
        deviation = jnp.maximum(
            jnp.mean(jax.lax.square(wide), axis=(1, 2)) - jax.lax.square(mean), 0
        )
    else:
        deviation = jnp.mean(jax.lax.square(wide - mean[:, None, None, :]), axis=(1, 2))
    return jnp.stack([mean, deviation], axis=-1)


def passing(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op(x, ...)` with a further keyword `passing`: for n > 0 it returns (result, x, ..., x), x being passed on n times.

    Whatever else reads x takes one of these. Then an op that has the keyword of its own accord gets their gradients while it writes that of
    x, and adds them; those of the ops that this function returns are added by XLA, as they are without it.
    """

    @functools.wraps(op)
    def call(x: Activation, *operands: Any, passing: int = 0, **options: Any) -> Any:
        result = op(x, *operands, **options)
        return (result, *(x,) * passing) if passing else result

    signature = inspect.signature(op)
    keyword = inspect.Parameter('passing', inspect.Parameter.KEYWORD_ONLY, default=0)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), keyword])  # type: ignore[attr-defined]
    return call
